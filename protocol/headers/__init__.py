"""Typed headers: one struct for the ext fields of each request and reply, one module per family of requests."""
