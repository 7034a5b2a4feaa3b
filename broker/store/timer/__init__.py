"""The timer's data: the wheel, its log, its checkpoint, and their recovery."""
