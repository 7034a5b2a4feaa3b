"""Files that grow, made of segments: the log and the consume queue of each queue, and the key index."""
