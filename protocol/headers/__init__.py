"""Typed headers: one struct for the ext fields of each request and reply, a module for each family of requests."""
