"""AdminBase: the client that all kinds of administration share, and how they find brokers."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import anyio
from msgspec import Struct

from trimq.client.core import Client, ClientOptions
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.lifecycle import Lifecycle
from trimq.client.routes import MASTER_ID
from trimq.protocol.body import ClusterInfo, TopicRouteData, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode

T = TypeVar("T")

REQUEST_TIMEOUT: Final = 10.0
"""Seconds that a request of administration may take, unless the options say otherwise."""


class AdminBase(Lifecycle):
    """Base class of administration: a client instance, its own or a shared one, and the addresses of brokers."""

    def __init__(
        self, namesrv: str | Iterable[str] | None, client: Client | None, options: ClientOptions | None
    ) -> None:
        super().__init__()
        self._own_client = client is None
        # namesrv_needed=False: requests to a broker's address need no name server.
        self.client: Client = client or Client(
            namesrv, options or ClientOptions(request_timeout=REQUEST_TIMEOUT), namesrv_needed=False
        )

    async def _prepare(self) -> None:
        if self._own_client:
            await self.client.__aenter__()

    async def _release(self) -> None:
        if self._own_client:
            await self.client.__aexit__(None, None, None)

    async def cluster_info(self) -> ClusterInfo:
        """All registered brokers by name, and the broker names of each cluster.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return sorted((await admin.cluster_info()).broker_addr_table)
        """
        reply = await self.client.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
        return decode_json(reply.body, ClusterInfo)

    async def addresses(
        self,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        masters_only: bool = True,
    ) -> list[str]:
        """The addresses of the brokers of a cluster, of those with the name ``broker``, or of all brokers.

        ``broker`` may also be an address, which is returned without a query. Raises UsageError for an unknown cluster
        or broker name.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return await admin.addresses(cluster="DefaultCluster")
        """
        if broker is not None and ":" in broker:
            return [broker]
        info = await self.cluster_info()
        if broker is not None:
            names = [broker]
        elif cluster is not None:
            if cluster not in info.cluster_addr_table:
                raise UsageError(f"no cluster {cluster}; there are {', '.join(sorted(info.cluster_addr_table))}")
            names = sorted(info.cluster_addr_table[cluster])
        else:
            names = sorted(info.broker_addr_table)
        found = []
        for name in names:
            data = info.broker_addr_table.get(name)
            if data is None:
                raise UsageError(f"no broker {name}; there are {', '.join(sorted(info.broker_addr_table))}")
            found += [
                address
                for number, address in sorted(data.broker_addrs.items())
                if number == MASTER_ID or not masters_only
            ]
        return found

    async def route(self, topic: str) -> TopicRouteData:
        """A topic's current route: its queues and brokers.

        Raises TopicNotFoundError, NoBrokerError, and UnreachableError if no name server answers.

        >>> async def example(admin: "Admin") -> int:
        ...     return sum(queues.write_queue_nums for queues in (await admin.route("Orders")).queue_datas)
        """
        return await self.client.fetch_route(topic)

    async def topic_masters(self, topic: str) -> list[str]:
        """The addresses of the masters that have a topic, in the order of their names. Raises as ``route``.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return await admin.topic_masters("Orders")
        """
        route = await self.route(topic)
        return [
            broker.broker_addrs[MASTER_ID]
            for broker in sorted(route.broker_datas, key=lambda broker: broker.broker_name)
            if MASTER_ID in broker.broker_addrs
        ]

    async def _ask(
        self,
        address: str,
        code: int,
        header: Struct | dict[str, str] | None,
        kind: type[T],
    ) -> T:
        """Sends a request and returns the body of the reply, decoded as ``kind``."""
        reply = await self.client.request(address, code, header if header is not None else {})
        return decode_json(reply.body or b"{}", kind)


async def each(addresses: Iterable[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Calls ``ask`` for all addresses at the same time and returns the answers by address.

    The first RocketMQError cancels the other calls and is raised.
    """
    found: dict[str, T] = {}
    errors: list[RocketMQError] = []

    async def one(address: str) -> None:
        try:
            found[address] = await ask(address)
        except RocketMQError as error:
            errors.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for address in addresses:
            group.start_soon(one, address)
    if errors:
        raise errors[0]
    return found


async def first_that_knows(addresses: Iterable[str], ask: Callable[[str], Awaitable[T]]) -> T:
    """The first answer that ``ask`` returns, trying the addresses in order. Raises the last error if all calls fail."""
    error: RocketMQError | None = None
    for address in addresses:
        try:
            return await ask(address)
        except RocketMQError as failure:
            error = failure
    raise error or UsageError("no broker to ask", code=ResponseCode.SYSTEM_ERROR)


def text_of(properties: dict[str, Any]) -> bytes:
    """Properties as ``key=value`` lines. Raises UsageError for a line break in one, or for ``=`` in a key."""
    for key, value in properties.items():
        if "\n" in f"{key}{value}" or "=" in key:
            raise UsageError(f"{key}={value} does not fit into one line")
    return "".join(f"{key}={value}\n" for key, value in properties.items()).encode()


def properties_of(text: bytes) -> dict[str, str]:
    """Properties from the ``key=value`` lines of a reply; comments and other lines are ignored."""
    found = {}
    for line in bytes(text).decode("utf-8", "replace").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found[key.strip()] = value.strip()
    return found
