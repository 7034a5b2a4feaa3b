"""Where segments are kept: providers and the metadata of segments."""
