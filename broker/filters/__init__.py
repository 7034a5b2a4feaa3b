"""Message filters: which messages a consumer's subscription accepts."""
