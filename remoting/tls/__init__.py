"""TLS of both ends of a connection: the socket that encrypts, and the certificates. No loop and no server in here."""
