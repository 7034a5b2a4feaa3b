"""Admin: the operations of mqadmin for programs, typed. Each kind of administered object has a module of its own."""

from collections.abc import Iterable

from trimq.client.admin.brokers import BrokerAdmin
from trimq.client.admin.clients import ClientAdmin
from trimq.client.admin.controllers import ControllerAdmin
from trimq.client.admin.name_servers import NameServerAdmin
from trimq.client.admin.timers import TimerAdmin
from trimq.client.admin.topics import TopicAdmin
from trimq.client.admin.traces import TraceAdmin
from trimq.client.admin.transactions import TransactionAdmin
from trimq.client.admin.users import UserAdmin
from trimq.client.core import Client, ClientOptions

__all__ = ["Admin"]


class Admin(
    TopicAdmin,
    ClientAdmin,
    BrokerAdmin,
    TraceAdmin,
    TransactionAdmin,
    TimerAdmin,
    NameServerAdmin,
    ControllerAdmin,
    UserAdmin,
):
    """Queries and changes topics, groups, offsets, messages, clients, users, brokers, name servers and controllers.

    An ``address`` argument is a broker's ``ip:port``; ``addresses`` finds the addresses by broker name or cluster.
    Calls that need only a broker's address work without a name server. ``options`` defaults to a ``request_timeout`` of
    10 seconds.

    All calls raise UsageError, NotStoredError or PerhapsStoredError, with the server's code and address. A call that
    changes several servers does so one after the other and ends at the first error; the servers before it are changed.

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
