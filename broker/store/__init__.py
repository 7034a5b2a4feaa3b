"""The message store. MessageStore (message_store.py) is the only door into it."""
