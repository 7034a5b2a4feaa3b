"""Benchmarks: run with `make bench`; the last report lies beside them."""
