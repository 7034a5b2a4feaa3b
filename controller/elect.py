"""The order in which brokers are elected. Source: RocketMQ's DefaultElectPolicy.

There the difference of two log ends is cut to 32 bits, so that the shorter of two logs may win.
"""

from collections.abc import Iterable
from typing import NamedTuple


class BrokerLiveInfo(NamedTuple):
    """What a broker's last heartbeat to this controller has said. It decides between brokers that may be elected."""

    epoch: int = 0
    max_offset: int = 0
    confirm_offset: int = 0
    priority: int = 2**31 - 1


def best(candidates: Iterable[tuple[int, BrokerLiveInfo]]) -> int | None:
    """The id of the broker with the newest epoch, then the longest log, then the lowest priority; None without any."""
    ranked = sorted(candidates, key=lambda found: (-found[1].epoch, -found[1].max_offset, found[1].priority, found[0]))
    return ranked[0][0] if ranked else None
