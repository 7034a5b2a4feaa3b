"""Runtime support for programs: clock, logs, measurements."""
