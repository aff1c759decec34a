"""Other queues on the same work, on the same machine, in the same sitting."""
