"""The broker daemon: processors (a module for each family of requests), services (tasks) and the store. Linux only."""

if __name__ != "trimq.broker":  # a second copy, whose classes would not be those of the first
    raise ImportError(f"this package is trimq.broker: import it by that name, not as {__name__}")
