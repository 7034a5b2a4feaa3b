"""Allocation: the strategies by which the members of a group share a topic's queues. Pure functions.

Every member computes its own share from the same sorted lists of queues and client ids, so all members must use the
same strategy. ``average``, ``circle``, ``machine_room`` and ``consistent_hash`` give exactly the shares of RocketMQ's
Java client; a client id that is not in the list gets no queue.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from math import ceil
from typing import Final, TypeAlias

from trimq.protocol.body import MessageQueue

Allocation: TypeAlias = Callable[[str, Sequence[MessageQueue], Sequence[str]], list[MessageQueue]]
"""A strategy: a function of (own client id, all queues sorted, all client ids sorted) that returns the own queues."""

_VIRTUAL_NODES: Final = 10
"""Points of each client on the hash ring, as in RocketMQ."""


def average(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Consecutive queues in equal shares; the first clients get one more (AllocateMessageQueueAveragely).

    >>> queues = [MessageQueue(topic="T", broker_name="a", queue_id=number) for number in range(5)]
    >>> [queue.queue_id for queue in average("c1", queues, ["c1", "c2"])]
    [0, 1, 2]
    """
    if client_id not in clients:
        return []
    index = clients.index(client_id)
    size, rest = divmod(len(queues), len(clients))
    start = index * size + min(index, rest)
    return list(queues[start : start + size + (1 if index < rest else 0)])


def circle(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Queues dealt to the clients in turn (AllocateMessageQueueAveragelyByCircle).

    >>> queues = [MessageQueue(topic="T", broker_name="a", queue_id=number) for number in range(5)]
    >>> [queue.queue_id for queue in circle("c2", queues, ["c1", "c2"])]
    [1, 3]
    """
    if client_id not in clients:
        return []
    return list(queues[clients.index(client_id) :: len(clients)])


def machine_room(rooms: Collection[str]) -> Allocation:
    """A strategy that takes only queues of brokers in one of the machine rooms, which are named ``room@name``.

    The group does not read queues in other machine rooms (AllocateMessageQueueByMachineRoom).

    >>> queues = [MessageQueue(topic="T", broker_name=name, queue_id=0) for name in ("x@a", "x@b", "y@c")]
    >>> [queue.broker_name for queue in machine_room({"x"})("c1", queues, ["c1"])]
    ['x@a', 'x@b']
    """
    wanted = frozenset(rooms)

    def allocate(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
        if client_id not in clients:
            return []
        near = [queue for queue in queues if _room(queue) in wanted]
        index = clients.index(client_id)
        size, rest = divmod(len(near), len(clients))
        # As in RocketMQ, the remaining queues are the last ones, not the neighbours of each share.
        extra = [near[index + size * len(clients)]] if index < rest else []
        return near[size * index : size * (index + 1)] + extra

    return allocate


def consistent_hash(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Queues by a hash ring with ten points for each client (AllocateMessageQueueConsistentHash).

    Few queues move when a member joins or leaves, but the shares are uneven.

    >>> queues = [MessageQueue(topic="T", broker_name="a", queue_id=number) for number in range(8)]
    >>> shares = [consistent_hash(client, queues, ["c1", "c2"]) for client in ("c1", "c2")]
    >>> sorted(shares[0] + shares[1]) == queues
    True
    """
    if client_id not in clients:
        return []
    ring = sorted(
        {_ring_hash(f"{client}-{point}"): client for client in clients for point in range(_VIRTUAL_NODES)}.items()
    )
    places = [place for place, _ in ring]

    def owner(queue: MessageQueue) -> str:
        text = f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"
        return ring[bisect_left(places, _ring_hash(text)) % len(ring)][1]

    return [queue for queue in queues if owner(queue) == client_id]


def sticky(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Equal shares that change as little as possible when a member joins or leaves; no counterpart in RocketMQ.

    Each queue ranks the clients by a hash of the pair and goes to the first whose share is not full; shares differ by
    at most one queue. All members of the group must use this SDK.

    >>> queues = [MessageQueue(topic="T", broker_name="a", queue_id=number) for number in range(6)]
    >>> [len(sticky(client, queues, ["c1", "c2", "c3"])) for client in ("c1", "c2", "c3")]
    [2, 2, 2]
    """
    if client_id not in clients:
        return []
    most = ceil(len(queues) / len(clients))
    full = len(queues) - (most - 1) * len(clients)
    held: dict[str, list[MessageQueue]] = {client: [] for client in clients}
    for queue in queues:
        name = f"{queue.topic}\0{queue.broker_name}\0{queue.queue_id}\0"
        for client in sorted(clients, key=lambda client, name=name: _ring_hash(name + client)):  # type: ignore[misc]
            limit = most if full > 0 else most - 1  # only ``full`` clients may have the larger share
            if len(held[client]) < limit:
                held[client].append(queue)
                full -= len(held[client]) == most
                break
    return held[client_id]


def _room(queue: MessageQueue) -> str | None:
    parts = queue.broker_name.split("@")
    return parts[0] if len(parts) == 2 else None


def _ring_hash(text: str) -> int:
    """The first four bytes of the MD5 sum, as RocketMQ's ConsistentHashRouter takes them."""
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:4], "big")
