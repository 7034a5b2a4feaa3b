"""The disk: the interface that tests replace, the mapped files, and what is known to be in memory."""
