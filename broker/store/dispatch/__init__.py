"""From the log to queues, index and whoever waits."""
