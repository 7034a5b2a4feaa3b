"""Jobs over stores and topics, each a function here and a command of ``python -m trimq.pipeline``."""
