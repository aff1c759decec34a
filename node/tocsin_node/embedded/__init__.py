"""Nodes without processes, ports and disks, in time driven by hand: what tocsin.testing runs.

    loop.py     an event loop whose time passes when it is told to
    engine.py   stands in for Raft: one log, applied on every node that is up
    wire.py     stands in for the network: calls from memory to memory, through the real API
    cluster.py  the nodes, and how time passes

Everything else is what a real node runs: admission, the state machine, the leader loops, the API.
"""
