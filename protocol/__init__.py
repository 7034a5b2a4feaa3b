"""The formats of the wire and of the store's files. Sans-IO: no trio, no socket, no file."""

if __name__ != "trimq.protocol":  # imported twice, it would define its classes twice
    raise ImportError(f"this package is trimq.protocol: import it by that name, not as {__name__}")
