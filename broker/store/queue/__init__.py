"""The consume queues and their files."""
