"""GroupMember: base class of producers and consumers, with their group and their own or a shared client instance."""

from collections.abc import Iterable

from trimq.client.core import Client, ClientOptions
from trimq.client.errors import UsageError
from trimq.client.lifecycle import Lifecycle
from trimq.protocol.topic_rules import group_problem


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

    async def _prepare(self) -> None:
        if self._own_client:
            await self.client.__aenter__()

    async def _release(self) -> None:
        if self._own_client:
            await self.client.__aexit__(None, None, None)
