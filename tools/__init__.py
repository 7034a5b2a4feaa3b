"""Tools for those who work on TriMQ; not installed."""
