"""Requests of mqadmin and other administration tools."""
