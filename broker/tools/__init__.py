"""Offline tools for a store directory."""
