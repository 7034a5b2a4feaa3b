"""The tier in a bucket of an object store. TriMQ's own: RocketMQ has no such provider."""
