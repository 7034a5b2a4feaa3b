"""GroupMember: base class of producers and consumers, with their group and their own or a shared client instance."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trimq.client.core import Client, ClientOptions
from trimq.client.errors import UsageError
from trimq.client.lifecycle import Lifecycle
from trimq.protocol.topic_rules import group_problem

if TYPE_CHECKING:
    from trimq.client.trace.dispatcher import TraceDispatcher
    from trimq.client.trace.hooks import TraceHooks


class GroupMember(Lifecycle):
    """A member of ``group``. Opens a client instance of its own, unless it is given an open one.

    Raises UsageError for an invalid group name, and if no name server is given and no client either.
    """

    def __init__(
        self, group: str, namesrv: str | Iterable[str] | None, client: Client | None, options: ClientOptions | None
    ) -> None:
        super().__init__()
        problem = group_problem(group)
        if problem is not None:
            raise UsageError(problem)
        self.group: str = group
        self._own_client = client is None
        self.client: Client = client or Client(namesrv, options)
        self.trace_dispatcher: TraceDispatcher | None = None
        """Sends the message traces, and counts them; None without ``enable_msg_trace``."""

    def _traced(self, kind: str, topic: str | None) -> "TraceHooks":
        """Switches message trace on; ``kind`` is PRODUCE or CONSUME. Returns the interceptor that makes the traces."""
        from trimq.client.trace.dispatcher import TraceDispatcher  # noqa: PLC0415 - programs without trace skip it
        from trimq.client.trace.hooks import TraceHooks  # noqa: PLC0415 - as above

        self.trace_dispatcher = TraceDispatcher(self.client, self.group, kind, topic)
        return TraceHooks(self.client, self.trace_dispatcher)

    def _start_trace(self) -> None:
        if self.trace_dispatcher is not None:
            self.trace_dispatcher.start()
            self.spawn(self.trace_dispatcher.run)

    async def _end_trace(self) -> None:
        if self.trace_dispatcher is not None:
            await self.trace_dispatcher.shutdown()

    async def _prepare(self) -> None:
        if self._own_client:
            await self.client.__aenter__()

    async def _release(self) -> None:
        if self._own_client:
            await self.client.__aexit__(None, None, None)
