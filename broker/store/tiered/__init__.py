"""The tiered store: history of the queues on cheaper storage. Layers: driver, container, access."""
