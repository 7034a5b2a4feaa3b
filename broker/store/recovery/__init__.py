"""How a store starts: checkpoint, recovery of log, queues and index."""
