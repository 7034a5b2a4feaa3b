"""The start of a store: checkpoint, and recovery of log, queues and index."""
