"""The broker daemon: processors (a module for each family of requests), services (tasks) and the store. Linux only."""
