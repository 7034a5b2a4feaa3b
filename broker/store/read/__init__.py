"""Gets and queries."""
