"""What a reply promises, and who brings the log to the device."""
