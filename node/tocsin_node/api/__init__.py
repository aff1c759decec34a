"""The gRPC edge: decode, admit, propose or read, encode. It decides nothing.

jobs runs cluster worker   one module per service
status                     the one table from reason to gRPC code and details
health                     the standard health service
_checkpoints               those of a worker session, on their way into the log in order
_forward                   every call from its arrival to its answer; a follower forwards once
_convert                   stored records to protos
_pages _filters            lists: their order, pages, filters, and the slices they are cut into
"""
