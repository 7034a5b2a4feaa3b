"""Sends: single messages, batches, and messages that consumers send back."""
