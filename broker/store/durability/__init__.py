"""What a reply guarantees, and how the log gets to the device."""
