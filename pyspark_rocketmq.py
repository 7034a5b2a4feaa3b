"""Spark finds the data source of the package ``pipeline`` under this name."""
