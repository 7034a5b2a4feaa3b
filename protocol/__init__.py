"""What goes over the wire and into a log record. Sans-IO: no trio, no socket, no file."""

if __name__ != "trimq.protocol":  # a second copy, whose classes would not be those of the first
    raise ImportError(f"this package is trimq.protocol: import it by that name, not as {__name__}")
