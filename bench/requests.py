"""CPU cost of requests in this process: frames as rmqload makes them, served by the real broker, without waiting.

python -m bench.requests [--rows send,batch,pull,query] [--count 20000] [--profile] [--json FILE] [--set KEY=VALUE]
[--signed].

Each figure is the loop thread's time for a request, and for the index work after it. The frame is in a socket; a round
of the reactor receives it, serves it and sends the reply. Each row has its own broker and states which path its
requests take, with the native extension or without (bench/paths.py, TRIMQ_NATIVE). If they take another path the row
fails, because its figure would be that of another path. With --signed the broker has authentication and authorization
on, and a user with policies signs the requests.
"""

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import trio

from bench import frames, mixed
from bench.frames import BATCH, BIG
from bench.paths import OtherPathError, PathCounter, RequestPath
from bench.wire import Turn, Wire, connected
from trimq.broker.controller import BrokerController
from trimq.broker.store.index.index_service import WAKE_AT
from trimq.broker.testing import running_broker
from trimq.protocol.auth.model import (
    Acl,
    Action,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    UserChange,
    subject_of,
)
from trimq.protocol.codes import RequestCode
from trimq.protocol.native import NATIVE
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC

WINDOW: Final = 32
"""Requests of one connection in a turn."""
FILLED: Final = 6400
"""Messages in the store before a row starts."""
OTHERS: Final = 0.05
"""The share of turns that may take another path, such as when the log allocates space. They are not in the figure."""
_CODES: Final = (
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.PULL_MESSAGE,
    RequestCode.QUERY_MESSAGE,
    RequestCode.END_TRANSACTION,
)


USER: Final = "load"
SECRET: Final = "secret of load"  # noqa: S105 - of this process
ASKING: Final = {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "allowSecretsInClear": True,
    "initAuthenticationUser": json.dumps({"username": "root", "password": "of no user"}),
}
"""The configuration of a broker that asks who sends a request."""

Sign = Callable[[bytes], bytes]
"""Signs a frame, or returns it as it is."""


class Make(Protocol):
    """Makes the ``number``-th request, with the content of the ``like``-th."""

    def __call__(self, number: int, like: int, /) -> bytes:
        """The frame."""
        ...


class Row(NamedTuple):
    """Requests of one kind.

    ``path``: the path that they must take; ``path_without_native`` if the native extension is off. In a turn there are
    ``window`` requests with ``messages`` each on each of the ``connections``. ``kinds``: the number of different turns,
    which are then repeated. ``ends``: the requests are halves, sent before each turn; their commits are measured.
    """

    path: RequestPath
    path_without_native: RequestPath
    make: Make
    connections: int = 1
    window: int = 1
    messages: int = 1
    kinds: int = 1
    ends: bool = False

    @property
    def expected(self) -> RequestPath:
        """The path that the requests must take in this process."""
        return self.path if NATIVE.is_on else self.path_without_native

    @property
    def requests(self) -> int:
        """The number of requests in a turn."""
        return self.connections * self.window


ROWS: Final[dict[str, Row]] = {
    "send alone": Row("single", "fast", lambda number, _: frames.send(number)),
    "send": Row("grouped", "fast", lambda number, _: frames.send(number), window=WINDOW),
    "send 64": Row("grouped", "fast", lambda number, _: frames.send(number), connections=64),
    "mixed alone": Row("single", "fast", mixed.send, kinds=64),
    "mixed": Row("grouped", "fast", mixed.send, window=WINDOW, kinds=16),
    "mixed 64": Row("grouped", "fast", mixed.send, connections=64, kinds=8),
    "half": Row("grouped", "full", lambda number, _: frames.half(number), window=WINDOW),
    "commit alone": Row("single", "full", lambda number, _: frames.half(number), ends=True),
    "commit": Row("grouped", "full", lambda number, _: frames.half(number), window=WINDOW, ends=True),
    "batch": Row("fast", "full", lambda number, _: frames.batch(number), messages=BATCH),
    "mixed batch": Row("fast", "full", mixed.batch, messages=BATCH, kinds=16),
    "pull": Row("fast", "fast", lambda number, _: frames.pull(number), messages=BATCH),
    "query": Row("fast", "fast", lambda number, _: frames.query(number), window=WINDOW),
}


class Load:
    """The requests of a row, turn by turn."""

    def __init__(self, wire: Wire, row: Row, sign: Sign = bytes) -> None:
        self._wire = wire
        self._sign = sign
        self._row = row
        self._turns = 0

    async def turn(self, counter: PathCounter) -> Turn:
        """Make and serve the requests of the next turn."""
        row = self._row
        begin = self._turns * row.requests
        same = self._turns % row.kinds * row.requests
        self._turns += 1
        made = [row.make(begin + at, same + at) for at in range(row.requests)]
        if row.ends:
            counter.taken((await self._serve(made)).requests)
            store = self._wire.broker.context.store
            places = store.look_units(TRANS_HALF_TOPIC, 0, begin, row.requests) or ()
            made = [frames.commit(begin + at, place) for at, (place, _, _) in enumerate(places)]
        return await self._serve(made)

    async def _serve(self, made: list[bytes]) -> Turn:
        connections = self._row.connections
        made = [self._sign(one) for one in made]
        return await self._wire.turn([b"".join(made[at::connections]) for at in range(connections)])


async def measure(
    wire: Wire, name: str, count: int, profile: cProfile.Profile | None = None, sign: Sign = bytes
) -> dict[str, float | str | dict[RequestPath, int]]:
    """Measure the requests of a row in microseconds: the first decile of each kind of turn, and the mean of these.

    The first decile is hardly affected by other processes on the machine. ``count`` is the approximate number of
    messages. Raises OtherPathError.
    """
    row = ROWS[name]
    expected = row.expected
    index = wire.broker.context.store.index
    took: list[list[float]] = [[] for _ in range(row.kinds)]
    paths: Counter[RequestPath] = Counter()
    behind = 0.0
    waiting = others = 0
    load = Load(wire, row, sign)
    with PathCounter(wire.connections[0].table, _CODES) as counter:
        for _ in range(max(row.kinds, 8)):  # creates topics and queues, and fills caches
            counter.taken((await load.turn(counter)).requests)
            await trio.lowlevel.checkpoint()
        turns = max(count // (row.requests * row.messages), 2 * row.kinds)
        for number in range(turns):
            if profile is not None:
                profile.enable()
            turn = await load.turn(counter)
            taken = counter.taken(turn.requests)
            paths += taken
            if turn.waited or taken[expected] != turn.requests:
                others += 1
            else:
                took[number % row.kinds].append(turn.seconds)
            if index is not None:
                began = time.thread_time()
                waiting += row.requests * row.messages
                if waiting >= WAKE_AT:
                    waiting = 0
                    while index.pending and index.apply():
                        pass
                behind += time.thread_time() - began
            if profile is not None:
                profile.disable()
            if number % 8 == 0:
                await trio.lowlevel.checkpoint()
    if others > OTHERS * turns or not all(took):
        raise OtherPathError(
            f"the requests of row {name} must take the path {expected!r}; in {others} of {turns} turns not all of them"
            f" did, or a reply had to be waited for: {_shares(paths)}"
        )
    each = sum(sorted(kind)[len(kind) // 10] for kind in took) / row.kinds / row.requests * 1e6
    return {
        "path": expected,
        "paths": dict(paths),
        "us_request": each,
        "us_index": behind / (turns * row.requests) * 1e6,
        "us_message": each / row.messages,
    }


def _shares(paths: Counter[RequestPath]) -> str:
    return ", ".join(f"{path} {count / paths.total():.1%}" for path, count in paths.most_common())


async def measure_row(
    name: str,
    count: int,
    settings: Mapping[str, object],
    profile: cProfile.Profile | None = None,
    *,
    signed: bool = False,
) -> dict[str, Any]:
    """The figures of a row, on a new broker with ``settings`` and a filled store.

    ``signed``: the broker asks for signatures, and the requests have them.
    """
    sign = _sign if signed else bytes
    settings = {**settings, **(ASKING if signed else {})}
    with tempfile.TemporaryDirectory() as directory:
        async with running_broker(Path(directory), clock=None, disk=None, **settings) as broker:
            if signed:
                await _make_user(broker)
            async with connected(broker) as wire:
                await fill(wire, sign)
            async with connected(broker, ROWS[name].connections) as wire:
                return await measure(wire, name, count, profile, sign)


def _sign(request: bytes) -> bytes:
    return frames.signed(request, USER, SECRET)


async def _make_user(broker: BrokerController) -> None:
    """Make the user, with a policy of several entries."""
    assert broker.context.users is not None
    store = broker.context.users.store
    await store.create_user(USER, UserChange(SECRET))
    both = (Action.PUB, Action.SUB)
    entries = [
        PolicyEntry(Resource.parse(text), both, Decision.ALLOW, ())
        for text in ("Topic:*", "Group:*", "Topic:Other", "Topic:More*")
    ]
    await store.write_acl(Acl(subject_of(USER), (Policy(PolicyType.CUSTOM, tuple(entries)),)))


async def fill(wire: Wire, sign: Sign = bytes) -> None:
    """Send the messages that pulls and queries read, and wait until they are in the index."""
    for begin in range(0, FILLED, WINDOW):
        await wire.turn([b"".join([sign(frames.send(number)) for number in range(begin, begin + WINDOW)])])
        await trio.lowlevel.checkpoint()
    index = wire.broker.context.store.index
    while index is not None and index.pending and index.apply():
        await trio.lowlevel.checkpoint()


async def run(arguments: argparse.Namespace) -> None:
    """Measure the selected rows."""
    profile = cProfile.Profile() if arguments.profile else None
    results: dict[str, Any] = {}
    for name in arguments.rows.split(","):
        settings = BIG | arguments.set
        result = results[name] = await measure_row(name, arguments.count, settings, profile, signed=arguments.signed)
        print(
            f"{name:12s} {result['us_request']:8.2f} us a request  {result['us_message']:7.2f} us a message  "
            f"index afterwards {result['us_index']:6.2f} us  {result['path']}",
            flush=True,
        )
    if profile is not None:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(40)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], help="KEY=VALUE of the broker's configuration"
    )
    parser.add_argument("--signed", action="store_true", help="with authentication and authorization")
    arguments = parser.parse_args()
    unknown = set(arguments.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"--rows accepts {', '.join(ROWS)}")
    arguments.set = dict(arguments.set)
    trio.run(run, arguments)


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


if __name__ == "__main__":
    main()
