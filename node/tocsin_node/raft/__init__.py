"""The replicated log: one Raft group behind engine.Engine. Only this package knows the library."""
