"""The commit log: puts, the append, the put-message lock, room for what comes."""
