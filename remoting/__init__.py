"""Transport: the server's reactor (trio) and client connections (anyio). Knows frames, not their meaning."""

if __name__ != "trimq.remoting":  # imported twice, it would define its classes twice
    raise ImportError(f"this package is trimq.remoting: import it by that name, not as {__name__}")
