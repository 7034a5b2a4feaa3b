"""Consume queues and their files."""
