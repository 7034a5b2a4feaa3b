"""From the log to queues, index and waiting pulls."""
