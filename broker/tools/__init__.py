"""Offline tools for a store directory: the command ``mqstore``."""
