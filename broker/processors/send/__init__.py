"""Sends: single messages, batches, messages that consumers send back."""
