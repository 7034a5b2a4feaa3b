"""Transactions: half messages, their ends, and the checks of those that were not ended."""
