"""The disk: the seam that tests replace, files that are mapped, what is known to be in memory."""
