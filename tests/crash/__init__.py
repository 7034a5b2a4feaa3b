"""Crash tests: power cuts and disk errors on a simulated disk, and the real broker process killed under load."""
