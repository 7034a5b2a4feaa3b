"""What programs need while they run: clock, logs, measurements."""
