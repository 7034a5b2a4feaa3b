"""A table of queues in a reply: offsets, limits, how far a group is."""

from trimq.protocol.body import Body, MessageQueue, encode_json
from trimq.remoting.server.large_reply import LargeReply


class QueueTable:
    """The entries of a table of queues, in fastjson's form, written into a reply as they are found.

    ``lead`` is what stands before the first of them; nothing is written before ``open``. ``behind`` sums up by how much
    the group is behind.
    """

    def __init__(self, reply: LargeReply, lead: bytes) -> None:
        self._reply = reply
        self._lead = lead
        self.behind = 0

    def open(self) -> None:
        """Write what stands before the first entry."""
        if self._lead != b",":
            self._reply.add(self._lead)
            self._lead = b""

    async def add(self, queue: MessageQueue, value: Body | int) -> None:
        """One more entry; others may work before the next one."""
        self.open()
        self._reply.add(self._lead + encode_json(queue) + b":" + encode_json(value))
        self._lead = b","
        await self._reply.pause()
