"""Reads messages for consumers, and answers queries."""
