"""How the broker uses the tier: upload, reads, and the store that joins tier and local disk."""
