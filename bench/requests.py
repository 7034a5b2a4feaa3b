"""CPU cost of requests in process: frames as rmqload makes them through the real broker, which does not wait for them.

python -m bench.requests [--rows send,batch,pull,query] [--count 20000] [--profile] [--json FILE] [--set KEY=VALUE].
Each figure is the loop thread's time for a request, and for the index work behind it: the frame lies in a socket, is
received in a round of the reactor's, served, and its reply is sent. Each row has a broker of its own and says which
path its requests take, with the native extension or without (bench/paths.py, TRIMQ_NATIVE). Where they take another
one it fails: the figure would be of something else.
"""

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import trio

from bench import frames, mixed
from bench.frames import BATCH, BIG
from bench.paths import OtherPathError, PathCounter, RequestPath
from bench.wire import Turn, Wire, connected
from trimq.broker.store.index.index_service import WAKE_AT
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.native import NATIVE

WINDOW: Final = 32
"""Requests of a connection in one turn."""
FILLED: Final = 6400
"""Messages of the store before a row begins."""
OTHERS: Final = 0.05
"""The part of turns that may take another path: those for which the log makes room, say. They are not in the figure."""
_CODES: Final = (
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.PULL_MESSAGE,
    RequestCode.QUERY_MESSAGE,
)


class Make(Protocol):
    """Makes the ``number``-th request, which is like the ``like``-th."""

    def __call__(self, number: int, like: int, /) -> bytes:
        """The frame."""
        ...


class Row(NamedTuple):
    """Requests of one kind.

    ``path``: what they have to take, ``path_without_native`` where the native extension is off. ``connections`` have
    ``window`` requests each in a turn, with ``messages`` in each. ``kinds``: so many turns differ from each other, and
    then they come again.
    """

    path: RequestPath
    path_without_native: RequestPath
    make: Make
    connections: int = 1
    window: int = 1
    messages: int = 1
    kinds: int = 1

    @property
    def expected(self) -> RequestPath:
        """The path that has to be taken here."""
        return self.path if NATIVE.is_on else self.path_without_native

    @property
    def requests(self) -> int:
        """Of a turn."""
        return self.connections * self.window


ROWS: Final[dict[str, Row]] = {
    "send alone": Row("single", "fast", lambda number, _: frames.send(number)),
    "send": Row("grouped", "fast", lambda number, _: frames.send(number), window=WINDOW),
    "send 64": Row("grouped", "fast", lambda number, _: frames.send(number), connections=64),
    "mixed alone": Row("single", "fast", mixed.send, kinds=64),
    "mixed": Row("grouped", "fast", mixed.send, window=WINDOW, kinds=16),
    "mixed 64": Row("grouped", "fast", mixed.send, connections=64, kinds=8),
    "batch": Row("fast", "full", lambda number, _: frames.batch(number), messages=BATCH),
    "mixed batch": Row("fast", "full", mixed.batch, messages=BATCH, kinds=16),
    "pull": Row("fast", "fast", lambda number, _: frames.pull(number), messages=BATCH),
    "query": Row("fast", "fast", lambda number, _: frames.query(number), window=WINDOW),
}


class Load:
    """The requests of a row, turn by turn."""

    def __init__(self, wire: Wire, row: Row) -> None:
        self._wire = wire
        self._row = row
        self._turns = 0

    async def turn(self) -> Turn:
        """The next one."""
        row = self._row
        begin = self._turns * row.requests
        same = self._turns % row.kinds * row.requests
        self._turns += 1
        made = [row.make(begin + at, same + at) for at in range(row.requests)]
        return await self._wire.turn([b"".join(made[at :: row.connections]) for at in range(row.connections)])


async def measure(
    wire: Wire, name: str, count: int, profile: cProfile.Profile | None = None
) -> dict[str, float | str | dict[RequestPath, int]]:
    """Microseconds of a row's requests: for each kind of turn the one that a tenth are faster than, and their mean.

    What else the machine does hardly shows in that. ``count``: about so many messages. Raises OtherPathError.
    """
    row = ROWS[name]
    expected = row.expected
    index = wire.broker.context.store.index
    took: list[list[float]] = [[] for _ in range(row.kinds)]
    paths: Counter[RequestPath] = Counter()
    behind = 0.0
    waiting = others = 0
    load = Load(wire, row)
    with PathCounter(wire.connections[0].table, _CODES) as counter:
        for _ in range(max(row.kinds, 8)):  # topics and queues are made, and what can be learnt is
            counter.taken((await load.turn()).requests)
            await trio.lowlevel.checkpoint()
        turns = max(count // (row.requests * row.messages), 2 * row.kinds)
        for number in range(turns):
            if profile is not None:
                profile.enable()
            turn = await load.turn()
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
            f"the row {name} is of requests that take the path {expected!r}; in {others} of {turns} turns not all of"
            f" them did, or their replies were waited for: {_shares(paths)}"
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
    name: str, count: int, settings: Mapping[str, object], profile: cProfile.Profile | None = None
) -> dict[str, Any]:
    """The figures of a row, on a broker with ``settings`` and a store that has something in it."""
    with tempfile.TemporaryDirectory() as directory:
        async with running_broker(Path(directory), clock=None, disk=None, **settings) as broker:
            async with connected(broker) as wire:
                await fill(wire)
            async with connected(broker, ROWS[name].connections) as wire:
                return await measure(wire, name, count, profile)


async def fill(wire: Wire) -> None:
    """Send what pulls and queries ask for, and wait until the index has it."""
    for begin in range(0, FILLED, WINDOW):
        await wire.turn([b"".join([frames.send(number) for number in range(begin, begin + WINDOW)])])
        await trio.lowlevel.checkpoint()
    index = wire.broker.context.store.index
    while index is not None and index.pending and index.apply():
        await trio.lowlevel.checkpoint()


async def run(arguments: argparse.Namespace) -> None:
    """All rows."""
    profile = cProfile.Profile() if arguments.profile else None
    results: dict[str, Any] = {}
    for name in arguments.rows.split(","):
        result = results[name] = await measure_row(name, arguments.count, BIG | arguments.set, profile)
        print(
            f"{name:12s} {result['us_request']:8.2f} us a request  {result['us_message']:7.2f} us a message  "
            f"index behind it {result['us_index']:6.2f} us  {result['path']}",
            flush=True,
        )
    if profile is not None:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(40)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", type=_setting, action="append", default=[], help="KEY=VALUE of the broker")
    arguments = parser.parse_args()
    unknown = set(arguments.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"--rows knows {', '.join(ROWS)}")
    arguments.set = dict(arguments.set)
    trio.run(run, arguments)


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


if __name__ == "__main__":
    main()
