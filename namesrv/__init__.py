"""The name server: it keeps a table of live brokers and their topics, and answers clients with routes."""

from importlib.util import find_spec

if __name__ != "trimq.namesrv":  # imported under two names, each class would exist twice and isinstance would fail
    raise ImportError(f"this package is trimq.namesrv: import it by that name, not as {__name__}")

if find_spec("trio") is None or find_spec("structlog") is None:
    raise ImportError("the name server needs more than the SDK: pip install 'trimq[broker]'")
