"""The name server: which brokers live, and which topics they serve."""

if __name__ != "trimq.namesrv":  # a second copy, whose classes would not be those of the first
    raise ImportError(f"this package is trimq.namesrv: import it by that name, not as {__name__}")
