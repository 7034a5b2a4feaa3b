"""The broker's services: the tables of topics, groups, clients and offsets, and the tasks that keep them current."""
