"""Who may do what on this broker: its configuration, and the feature of the gate that checks every request."""
