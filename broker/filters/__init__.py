"""Message filters: what a consumer's subscription lets through."""
