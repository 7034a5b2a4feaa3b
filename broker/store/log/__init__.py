"""The commit log: puts, the append, the put-message lock, and the allocation of space."""
