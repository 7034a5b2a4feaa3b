"""Pulls: the full path, the fast path, and their replies."""
