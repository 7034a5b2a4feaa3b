"""Administration, typed: what mqadmin does, for programs. One module for each kind of thing that is administered."""

from collections.abc import Iterable

from trimq.client.admin.brokers import BrokerAdmin
from trimq.client.admin.clients import ClientAdmin
from trimq.client.admin.messages import MessageAdmin
from trimq.client.admin.name_servers import NameServerAdmin
from trimq.client.admin.topics import TopicAdmin
from trimq.client.core import Client, ClientOptions

__all__ = ["Admin"]


class Admin(TopicAdmin, ClientAdmin, BrokerAdmin, MessageAdmin, NameServerAdmin):
    """Asks and changes what brokers and name servers have.

    Where a broker is to be named, it is by its address; ``addresses`` finds them by name or cluster. What needs no name
    server works without one.
    All calls raise UsageError, NotStoredError or PerhapsStoredError; each error has the server's code and address.

    >>> async def example(namesrv: str) -> None:
    ...     async with Admin(namesrv) as admin:
    ...         await admin.create_topic("Orders", queues=8)
    ...         print(await admin.topic_stats("Orders"))
    """

    def __init__(
        self,
        namesrv: str | Iterable[str] | None = None,
        *,
        client: Client | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        super().__init__(namesrv, client, options)
