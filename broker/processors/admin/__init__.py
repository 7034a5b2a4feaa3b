"""What mqadmin asks."""
