"""Benchmarks: run with `make bench`, which writes REPORT.md in this folder."""
