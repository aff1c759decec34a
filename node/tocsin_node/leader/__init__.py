"""What runs on the leader only: it decides and proposes, and never changes state itself.

    leases      how long each lease has left, renewals, expiries, rounds that confirm leadership
    dispatcher  sessions of workers, their credit, which run goes to whom
    ticker      which jobs are due

Each has `start(term)`, called once the node serves as leader, and `stop()`, called when it does no
longer. Start leases first and the ticker last, stop in reverse: a grant needs its lease watched.
What they remember is only the leader's memory; a new leader starts from the state alone.
"""
