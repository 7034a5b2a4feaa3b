"""The broker's services: what it knows of topics, groups, clients and offsets, and the tasks that keep that current."""
