"""Transport: the server's reactor (trio) and client connections (anyio). Knows frames, not what they mean."""

if __name__ != "trimq.remoting":  # a second copy, whose classes would not be those of the first
    raise ImportError(f"this package is trimq.remoting: import it by that name, not as {__name__}")
