"""The real broker in a process of its own, killed under load, and what its clients find afterwards."""
