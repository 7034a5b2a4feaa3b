"""Transport: the server's reactor (trio) and client connections (anyio). Knows frames, not what they mean."""
