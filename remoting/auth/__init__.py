"""Users and policies of a running server: the store, its secrets, who a request is from, and what it may do."""
