"""The name server: which brokers live, and which topics they serve."""

from importlib.util import find_spec

if __name__ != "trimq.namesrv":  # a second copy, whose classes would not be those of the first
    raise ImportError(f"this package is trimq.namesrv: import it by that name, not as {__name__}")

if find_spec("trio") is None or find_spec("structlog") is None:
    raise ImportError("the name server needs more than the SDK: pip install 'trimq[broker]'")
