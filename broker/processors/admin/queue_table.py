"""A table with an entry per queue in a reply: offsets, or a group's progress."""

from trimq.protocol.body import Body, MessageQueue, encode_json
from trimq.remoting.server.large_reply import LargeReply


class QueueTable:
    """Writes the entries of a table into a reply one by one, in fastjson's form: the keys are JSON objects.

    ``lead`` is the text before the first entry. Nothing is written before ``open``. ``behind`` sums up the group's lag.
    """

    def __init__(self, reply: LargeReply, lead: bytes) -> None:
        self._reply = reply
        self._lead = lead
        self.behind = 0

    def open(self) -> None:
        """Write the lead, once."""
        if self._lead != b",":
            self._reply.add(self._lead)
            self._lead = b""

    async def add(self, queue: MessageQueue, value: Body | int) -> None:
        """Write one entry. Other tasks may run before the next one."""
        self.open()
        self._reply.add(self._lead + encode_json(queue) + b":" + encode_json(value))
        self._lead = b","
        await self._reply.pause()
