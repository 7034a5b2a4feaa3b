"""The controllers: they elect the master of each broker group, and keep what was decided in etcd, or in SQLite."""

from importlib.util import find_spec

if __name__ != "trimq.controller":  # imported under two names, each class would exist twice and isinstance would fail
    raise ImportError(f"this package is trimq.controller: import it by that name, not as {__name__}")

if find_spec("trio") is None or find_spec("structlog") is None:
    raise ImportError("a controller needs more than the SDK: pip install 'trimq[controller]'")
