"""The tests; the folders mirror the rooms."""
