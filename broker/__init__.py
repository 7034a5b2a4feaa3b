"""The broker daemon: processors (one module per family of requests), services (tasks, tables) and store. Linux only."""

from importlib.util import find_spec

if __name__ != "trimq.broker":  # a second copy would define its own classes, which never equal those of the first
    raise ImportError(f"this package is trimq.broker: import it by that name, not as {__name__}")

if find_spec("trio") is None or find_spec("structlog") is None:
    raise ImportError("the broker needs more than the SDK: pip install 'trimq[broker]'")
