"""What producers and consumers have in common: a group, and a client instance, their own or a shared one."""

from collections.abc import Iterable

from trimq.client.core import Client, ClientOptions
from trimq.client.errors import UsageError
from trimq.client.lifecycle import Lifecycle
from trimq.protocol.topic_rules import group_problem


class GroupMember(Lifecycle):
    """A member of ``group``. Opens a client instance of its own, unless it is given one that is open.

    Raises UsageError for a name that no group can have.
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
