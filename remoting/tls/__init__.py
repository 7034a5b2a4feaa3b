"""TLS of both sides: configuration, certificates, contexts, and the socket that encrypts."""
