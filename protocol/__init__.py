"""What goes over the wire and into a log record. Sans-IO: no trio, no socket, no file."""
