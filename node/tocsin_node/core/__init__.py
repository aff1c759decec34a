"""What every replica replays: records, commands, and the one function that changes state.

Nothing here asks for the time, chance, configuration, files or the network: two replicas that are
given the same log reach the same state. Read model.py, then command.py, then machine.py.
"""
