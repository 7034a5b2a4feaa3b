"""Message trace: producers and consumers report what happens to each message to a topic of the broker.

``hooks`` makes the reports from sends, processing and transactions, ``dispatcher`` collects and sends them. Both are
loaded only by producers and consumers with ``enable_msg_trace``. ``Admin.message_traces`` reads the reports.
"""
