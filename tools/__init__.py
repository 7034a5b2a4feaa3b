"""Tools for the development of TriMQ; not installed."""
