"""Requests that a fast handler leaves or never sees: the full handler gets each once, as it was sent."""

import itertools
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
import structlog.testing
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from tests.remoting.harness import Peer, Server, serving, until, within_seconds
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import encode
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, FastHandler, Handler, Later, Outcome
from trimq.remoting.server.intake import BIG_FRAME
from trimq.remoting.server.limits import RECEIVE_BUFFER, ReactorLimits
from trimq.remoting.server.reactor import Connection

CODE = 100
"""The code with a fast handler."""
OTHER = 101
"""The code without one."""

ONE_BY_ONE = pytest.mark.parametrize("one_by_one", [False, True], ids=["in one burst", "one by one"])


class Fields(Struct):
    word: str
    other: int = 0


class Word(Struct):
    """Another type of header for the same ext fields."""

    word: str


def frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def plain(opaque: int, body: bytes = b"", *, word: str = "w", flag: int = 0, code: int = CODE) -> bytes:
    return frame(
        b'{"code":%d,"extFields":{"other":"7","word":"%b"},"flag":%d,"language":"JAVA","opaque":%d,'
        b'"serializeTypeCurrentRPC":"JSON","version":453}' % (code, word.encode(), flag, opaque),
        body,
    )


class Seen(NamedTuple):
    """The request as given to a handler."""

    code: int
    opaque: int
    flag: int
    header: Fields
    ext: dict[str, str]
    body: bytes
    encoding: Encoding


def seen(command: RemotingCommand) -> Seen:
    assert command.header(Word).word == command.header(Fields).word
    return Seen(
        command.code,
        command.opaque,
        command.flag,
        command.header(Fields),
        command.ext_fields(),
        bytes(command.body),
        command.encoding,
    )


class Handlers:
    """A fast handler that serves requests with the word ``fast`` and leaves the rest, and full ones that serve all."""

    def __init__(self) -> None:
        self.fast: list[int] = []
        """Opaques of the requests given to the fast handler."""
        self.full: list[Seen] = []

    def serve_fast(self, _connection: Connection, request: TypedRequest[Fields]) -> bytes | None:
        self.fast.append(request.opaque)
        if request.header.word != "fast":
            return None
        oneway = request.flag & 2
        return b"" if oneway else encode(RemotingCommand(CODE, request.opaque).reply(body=request.body))

    def serve_full(self, _connection: Connection, command: RemotingCommand) -> Outcome:
        self.full.append(seen(command))
        return command.reply(body=bytes(command.body))

    def table(self) -> HandlerTable:
        table = HandlerTable()
        table.register(CODE, self.serve_full, header=Fields, fast=self.serve_fast)
        table.register(OTHER, self.serve_full)
        return table


class Sent(NamedTuple):
    """A request and its expected outcome."""

    data: bytes
    given: Seen
    looked_at: bool = True
    """Whether it is given to a fast handler."""


def sent(
    data: bytes,
    opaque: int,
    body: bytes,
    *,
    code: int = CODE,
    flag: int = 0,
    word: str = "w",
    other: int = 7,
    ext: dict[str, str] | None = None,
    encoding: Encoding = Encoding.JSON,
    looked_at: bool = True,
) -> Sent:
    fields = {"other": str(other), "word": word} if ext is None else ext
    return Sent(data, Seen(code, opaque, flag, Fields(word, other), fields, body, encoding), looked_at)


def ordinary(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body), opaque, body)


def served_fast(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body, word="fast"), opaque, body, word="fast")


def oneway(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body, flag=2), opaque, body, flag=2)


def oneway_served_fast(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body, flag=2, word="fast"), opaque, body, flag=2, word="fast")


def unknown_fields(opaque: int, body: bytes) -> Sent:
    header = b'{"code":100,"extFields":{"word":"%b","x":[1,"2"],"y":null,"other":7},"opaque":%d}' % (
        "größe".encode(),
        opaque,
    )
    return sent(frame(header, body), opaque, body, word="größe", ext={"word": "größe", "x": '[1,"2"]', "other": "7"})


def hostile_names(opaque: int, body: bytes) -> Sent:
    names = b'"~body":"mine","~typed":{"word":"mine"},"~head":"{}","~ext":{"word":"mine"},"~encoding":1'
    header = b'{"code":100,"opaque":%d,"extFields":{"word":"w","other":"7"},%b}' % (opaque, names)
    return sent(frame(header, body), opaque, body)


def number_for_text(opaque: int, body: bytes) -> Sent:
    header = b'{"code":100,"extFields":{"word":5,"other":"7"},"opaque":%d}' % opaque
    return sent(frame(header, body), opaque, body, word="5", looked_at=False)


def blanks(opaque: int, body: bytes) -> Sent:
    header = b'{"code":100,"extFields":{"word":"w","other":" "},"flag":2,"opaque":%d}' % opaque
    ext = {"word": "w", "other": " "}
    return sent(frame(header, body), opaque, body, other=0, ext=ext, flag=2, looked_at=False)


def code_not_in_front(opaque: int, body: bytes) -> Sent:
    header = b'{"opaque":%d,"code":100,"extFields":{"word":"w","other":"7"}}' % opaque
    return sent(frame(header, body), opaque, body, looked_at=False)


def second_code(opaque: int, body: bytes) -> Sent:
    header = b'{"code":100,"extFields":{"word":"fast","other":"7"},"opaque":%d,"code":101}' % opaque
    return sent(frame(header, body), opaque, body, code=OTHER, word="fast", looked_at=False)


def second_code_of_the_fast_one(opaque: int, body: bytes) -> Sent:
    header = b'{"code":101,"extFields":{"word":"fast","other":"7"},"opaque":%d,"code":100}' % opaque
    return sent(frame(header, body), opaque, body, word="fast", looked_at=False)


def another_bit(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body, flag=4, word="fast"), opaque, body, flag=4, word="fast", looked_at=False)


def another_bit_and_oneway(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body, flag=6, word="fast"), opaque, body, flag=6, word="fast", looked_at=False)


def all_bits_but_that_of_a_reply(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body, flag=-2, word="fast"), opaque, body, flag=-2, word="fast", looked_at=False)


def a_high_bit(opaque: int, body: bytes) -> Sent:
    flag = 1 << 20
    return sent(plain(opaque, body, flag=flag, word="fast"), opaque, body, flag=flag, word="fast", looked_at=False)


def another_code(opaque: int, body: bytes) -> Sent:
    return sent(plain(opaque, body, code=OTHER), opaque, body, code=OTHER, looked_at=False)


def encoded(opaque: int, body: bytes, encoding: Encoding) -> Sent:
    command = RemotingCommand.request(CODE, {"other": "7", "word": "fast"}, body, encoding=encoding)
    command.opaque = opaque
    return sent(encode(command), opaque, body, word="fast", encoding=encoding, looked_at=False)


def binary(opaque: int, body: bytes) -> Sent:
    return encoded(opaque, body, Encoding.ROCKETMQ)


def msgpack(opaque: int, body: bytes) -> Sent:
    return encoded(opaque, body, Encoding.MSGPACK)


def long_body(opaque: int, _body: bytes) -> Sent:
    return ordinary(opaque, b"%d" % opaque + bytes(BIG_FRAME))


def longer_than_the_buffer(opaque: int, _body: bytes) -> Sent:
    return ordinary(opaque, b"%d" % opaque + bytes(RECEIVE_BUFFER))


KINDS: list[Callable[[int, bytes], Sent]] = [
    ordinary,
    served_fast,
    oneway,
    oneway_served_fast,
    unknown_fields,
    hostile_names,
    number_for_text,
    blanks,
    code_not_in_front,
    second_code,
    second_code_of_the_fast_one,
    another_bit,
    another_bit_and_oneway,
    all_bits_but_that_of_a_reply,
    a_high_bit,
    another_code,
    binary,
    msgpack,
    long_body,
    longer_than_the_buffer,
]


async def send(server: Server, peer: Peer, data: list[bytes], *, one_by_one: bool) -> None:
    """Send all requests together, or each after those before have been served."""
    if not one_by_one:
        await peer.send_bytes(b"".join(data))
        return
    for each in data:
        served = server.reactor.stats.frames
        await peer.send_bytes(each)
        await until(server, f"s.frames > {served}")


async def exchange(kinds: list[Callable[[int, bytes], Sent]], *, one_by_one: bool) -> None:
    """Each request reaches the handler that it is for, once and in order, and has one reply if it wants one."""
    handlers = Handlers()
    requests = [kind(opaque, b"body %d" % opaque) for opaque, kind in enumerate(kinds, 1)]
    last = ordinary(len(kinds) + 1, b"the last one")
    async with within_seconds(handlers.table()) as server, server.peer() as peer, trio.open_nursery() as nursery:
        replies: list[RemotingCommand] = []

        async def receive() -> None:
            while not replies or replies[-1].opaque != last.given.opaque:
                replies.append(await peer.receive())

        nursery.start_soon(receive)
        await send(server, peer, [each.data for each in requests], one_by_one=one_by_one)
        await until(server, f"s.frames == {len(requests)}")
        if requests:
            assert server.connection().encoding == requests[-1].given.encoding
        await peer.send_bytes(last.data)
    requests.append(last)
    for_full = [each.given for each in requests if not (each.looked_at and each.given.header.word == "fast")]
    assert handlers.full == for_full
    assert handlers.fast == [each.given.opaque for each in requests if each.looked_at]
    answered = sorted((reply.opaque, reply.code, reply.encoding, bytes(reply.body)) for reply in replies)
    wanted = [each.given for each in requests if not each.given.flag & 2]
    assert answered == [(given.opaque, 0, given.encoding, given.body) for given in wanted]
    assert all(reply.is_reply for reply in replies)


@ONE_BY_ONE
@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_request_by_itself(kind: Callable[[int, bytes], Sent], one_by_one: bool) -> None:
    await exchange([kind] * 3, one_by_one=one_by_one)


@ONE_BY_ONE
async def test_all_kinds_of_requests_on_one_connection(one_by_one: bool) -> None:
    await exchange(KINDS + KINDS[::-1], one_by_one=one_by_one)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(KINDS), max_size=12), st.booleans())
def test_any_traffic_on_one_connection(kinds: list[Callable[[int, bytes], Sent]], one_by_one: bool) -> None:
    async def main() -> None:
        await exchange(kinds, one_by_one=one_by_one)

    trio.run(main)


@ONE_BY_ONE
async def test_the_full_handler_gets_the_header_that_the_fast_one_has_seen(one_by_one: bool) -> None:
    """The header is not decoded again."""
    looked_at: list[Fields] = []
    given: list[Fields] = []
    table = HandlerTable()

    def full(_connection: Connection, command: RemotingCommand) -> Outcome:
        given.append(command.header(Fields))
        return command.reply()

    table.register(CODE, full, header=Fields, fast=lambda _, request: looked_at.append(request.header))
    async with serving(table) as server, server.peer() as peer:
        await send(server, peer, [plain(1), plain(2)], one_by_one=one_by_one)
        assert [(await peer.receive()).opaque for _ in range(2)] == [1, 2]
    assert len(given) == 2
    assert all(one is other for one, other in zip(looked_at, given, strict=True))


@ONE_BY_ONE
async def test_a_second_code_without_a_handler(one_by_one: bool) -> None:
    handlers = Handlers()
    header = b'{"code":100,"extFields":{"word":"fast"},"opaque":%d,"code":102}'
    async with serving(handlers.table()) as server, server.peer() as peer:
        await send(server, peer, [frame(header % 1), frame(header % 2)], one_by_one=one_by_one)
        replies = [await peer.receive() for _ in range(2)]
        assert [(reply.opaque, reply.code) for reply in replies] == [
            (1, ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
            (2, ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
        ]
    assert (handlers.fast, handlers.full) == ([], [])


# exceptions


def fails(error: Exception) -> FastHandler:
    def raising(*_: object) -> bytes | None:
        raise error

    return raising


ERRORS: list[tuple[Exception, int, str]] = [
    (RemotingError(17, "no such topic"), 17, "no such topic"),
    (ValueError("broken"), 1, "ValueError: broken"),
    (msgspec.DecodeError("inside"), 1, "DecodeError: inside"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "inside"), 1, "UnicodeDecodeError"),
    (RecursionError("inside"), 1, "RecursionError: inside"),
    (FrameError("inside"), 1, "FrameError: inside"),
]


@ONE_BY_ONE
@pytest.mark.parametrize(("error", "code", "remark"), ERRORS, ids=[type(error[0]).__name__ for error in ERRORS])
async def test_what_a_fast_handler_raises(error: Exception, code: int, remark: str, one_by_one: bool) -> None:
    """The exception becomes the reply, if one is wanted; the full handler is not called; the connection continues."""
    handlers = Handlers()
    table = handlers.table()
    table.register(CODE, handlers.serve_full, header=Fields, fast=fails(error))
    before = encode(RemotingCommand(OTHER, 1, ext={"word": "w"}, encoding=Encoding.ROCKETMQ))
    requests = [before, plain(2), plain(3, flag=2), plain(4), plain(5, flag=2)]
    async with serving(table) as server, server.peer() as peer:
        with structlog.testing.capture_logs() as logs:
            await send(server, peer, requests, one_by_one=one_by_one)
            await until(server, "s.frames == 5")
        assert server.connection().encoding == Encoding.JSON
        await peer.send_bytes(plain(6, code=OTHER))
        replies = [await peer.receive() for _ in range(4)]
        assert [(reply.opaque, reply.code) for reply in replies] == [(1, 0), (2, code), (4, code), (6, 0)]
        assert all((reply.remark or "").startswith(remark) for reply in replies[1:3])
        assert all(reply.is_reply and reply.encoding == Encoding.JSON for reply in replies[1:])
        failures = 0 if isinstance(error, RemotingError) else 4
        assert server.reactor.stats.failures == len(logs) == failures
    assert [given.opaque for given in handlers.full] == [1, 6]


@ONE_BY_ONE
async def test_what_a_full_handler_raises_for_what_was_left(one_by_one: bool) -> None:
    def full(_connection: Connection, command: RemotingCommand) -> Outcome:
        raise (RemotingError(17, "no such topic") if command.opaque < 3 else ValueError("broken"))

    table = HandlerTable()
    table.register(CODE, full, header=Fields, fast=lambda *_: None)
    table.register(OTHER, Handlers().serve_full)
    requests = [plain(1), plain(2, flag=2), plain(3), plain(4, flag=2), plain(5, code=OTHER)]
    async with serving(table) as server, server.peer() as peer:
        with structlog.testing.capture_logs():
            await send(server, peer, requests, one_by_one=one_by_one)
            replies = [await peer.receive() for _ in range(3)]
        assert [(reply.opaque, reply.code) for reply in replies] == [(1, 17), (3, 1), (5, 0)]
        assert server.reactor.stats.failures == 2


@ONE_BY_ONE
@pytest.mark.parametrize("header", [Word, None], ids=["as a fast one sees it", "that does not fit"])
async def test_a_header_that_the_full_handler_refuses(header: type[Struct] | None, one_by_one: bool) -> None:
    """The error of a header type that the request does not fit is the same whether a fast handler was there or not."""

    class Needs(Struct):
        missing: int

    def full(_connection: Connection, command: RemotingCommand) -> Outcome:
        return command.reply(body=repr(command.header(header or Needs)).encode())

    table = HandlerTable()
    table.register(CODE, full, header=Fields, fast=lambda *_: None)
    table.register(OTHER, full)
    requests = [plain(1), plain(1, code=OTHER)]
    async with serving(table) as server, server.peer() as peer:
        await send(server, peer, requests, one_by_one=one_by_one)
        replies = [await peer.receive() for _ in range(2)]
        assert replies[0].code == (ResponseCode.SUCCESS if header else ResponseCode.SYSTEM_ERROR)
        assert encode(replies[0]) == encode(replies[1])
        assert server.reactor.stats.failures == 0


# requests retained by a handler


def waiting(gate: trio.Event, before: list[Seen], *, is_coroutine: bool) -> Handler:
    """A full handler that reads its request before and after it has waited."""

    async def wait(_connection: Connection, command: RemotingCommand) -> Outcome:
        before.append(seen(command))
        await gate.wait()
        return command.reply(body=repr(seen(command)).encode())

    def plain_function(connection: Connection, command: RemotingCommand) -> Awaitable[Outcome]:
        return wait(connection, command)

    return wait if is_coroutine else plain_function


@ONE_BY_ONE
@pytest.mark.parametrize("is_coroutine", [True, False])
@pytest.mark.parametrize("size", [10, BIG_FRAME, RECEIVE_BUFFER])
async def test_a_handler_that_waits_has_its_own_bytes(size: int, is_coroutine: bool, one_by_one: bool) -> None:
    gate = trio.Event()
    before: list[Seen] = []
    table = HandlerTable()
    handler = waiting(gate, before, is_coroutine=is_coroutine)
    table.register(CODE, handler, copy_body=True, header=Fields, fast=lambda *_: None)
    table.register(OTHER, lambda *_: None)
    requests = [plain(1, b"1" * size, word="first"), plain(2, b"2" * size, word="other"), plain(3, flag=2)]
    async with within_seconds(table) as server, server.peer() as peer:
        await send(server, peer, requests, one_by_one=one_by_one)
        await until(server, "s.frames == 3")
        await trio.testing.wait_all_tasks_blocked()
        for opaque in range(4, 8):  # each overwrites the receive buffer of the one before
            await peer.send_bytes(plain(opaque, b"#" * (size + 1000), word="#" * 100, code=OTHER, flag=2))
            await until(server, f"s.frames == {opaque}")
        gate.set()
        replies = sorted([await peer.receive(), await peer.receive()], key=lambda reply: reply.opaque)
        assert [reply.opaque for reply in replies] == [1, 2]
        before.sort(key=lambda given: given.opaque)  # the tasks started in any order
        assert [given.opaque for given in before] == [1, 2, 3]
        assert before[0].body == b"1" * size
        assert before[0].ext == {"other": "7", "word": "first"}
        assert [bytes(reply.body).decode() for reply in replies] == [repr(given) for given in before[:2]]


# replies of the client


@pytest.mark.parametrize("flag", [1, 3])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_reply_of_the_client_that_has_the_code_of_a_fast_handler(flag: int, others: int) -> None:
    """Alone, and between requests."""
    handlers = Handlers()
    async with within_seconds(handlers.table()) as server, server.peer() as peer, trio.open_nursery() as nursery:
        await peer.ask(RemotingCommand(OTHER, 1, ext={"word": "w"}))
        found: list[RemotingCommand] = []

        async def ask() -> None:
            found.append(await server.connection().request(RemotingCommand.request(307), 10))

        nursery.start_soon(ask)
        asked = await peer.receive()
        reply = frame(
            b'{"code":100,"extFields":{"other":"7","word":"fast"},"flag":%d,"opaque":%d,"remark":"why"}'
            % (flag, asked.opaque),
            b"the body",
        )
        around = plain(2, word="fast") * others
        await peer.send_bytes(around + reply + around)
        while not found:
            await trio.lowlevel.checkpoint()
        assert [(await peer.receive()).opaque for _ in range(2 * others)] == [2, 2][: 2 * others]
        last = await peer.ask(RemotingCommand(OTHER, 3, ext={"word": "w"}))
        assert last.opaque == 3
        assert server.reactor.stats.frames == 3 + 2 * others
    assert [(answer.code, answer.remark, bytes(answer.body)) for answer in found] == [(100, "why", b"the body")]
    assert found[0].ext_fields() == {"other": "7", "word": "fast"}
    assert handlers.fast == [2] * (2 * others)
    assert [given.opaque for given in handlers.full] == [1, 3]


async def test_a_request_with_the_number_of_one_of_ours_is_no_reply() -> None:
    handlers = Handlers()
    async with within_seconds(handlers.table()) as server, server.peer() as peer, trio.open_nursery() as nursery:
        await peer.ask(RemotingCommand(OTHER, 1, ext={"word": "w"}))
        nursery.start_soon(server.connection().request, RemotingCommand.request(307), 10)
        asked = await peer.receive()
        await peer.send_bytes(plain(asked.opaque, b"a request"))
        assert bytes((await peer.receive()).body) == b"a request"
        await peer.send_bytes(frame(b'{"code":0,"flag":1,"opaque":%d}' % asked.opaque))


# limits


class Keeper:
    """Full handlers, for requests left by a fast one, that do not reply until they are released."""

    def __init__(self) -> None:
        self.looked_at: list[int] = []
        self.kept: list[tuple[Connection, RemotingCommand]] = []
        self.gate = trio.Event()

    def fast(self, _connection: Connection, request: TypedRequest[Any]) -> bytes | None:
        self.looked_at.append(request.opaque)
        return None

    def full(self, connection: Connection, command: RemotingCommand) -> Outcome:
        self.kept.append((connection, command))
        return None if command.is_oneway else DEFERRED

    async def task(self, connection: Connection, command: RemotingCommand) -> Outcome:
        self.kept.append((connection, command))
        await self.gate.wait()
        return command.reply()

    def table(self, *, as_task: bool) -> HandlerTable:
        table = HandlerTable()
        table.register(CODE, self.task if as_task else self.full, header=Fields, fast=self.fast)
        return table


@ONE_BY_ONE
@pytest.mark.parametrize("as_task", [False, True])
@pytest.mark.parametrize(
    ("limits", "key"),
    [
        (ReactorLimits(max_inflight_per_connection=2), "maxRequestsInFlightPerConnection"),
        (ReactorLimits(max_inflight=2), "maxRequestsInFlight"),
    ],
)
async def test_beyond_the_limits_no_fast_handler_is_asked(
    limits: ReactorLimits, key: str, as_task: bool, one_by_one: bool
) -> None:
    """The reply is SYSTEM_BUSY. One-ways are served, but not as tasks beyond the limit of the server.

    So are requests sent after those in flight have ended.
    """
    keeper = Keeper()
    oneways = 0 if not as_task else int(key == "maxRequestsInFlightPerConnection")
    dropped = int(as_task and not oneways)
    async with within_seconds(keeper.table(as_task=as_task), limits) as server, server.peer() as peer:
        requests = [plain(1), plain(2), plain(3), plain(4, flag=2), plain(5)]
        await send(server, peer, requests, one_by_one=one_by_one)
        replies = [await peer.receive(), await peer.receive()]
        assert [(reply.opaque, reply.code) for reply in replies] == [
            (3, ResponseCode.SYSTEM_BUSY),
            (5, ResponseCode.SYSTEM_BUSY),
        ]
        assert all((reply.remark or "").startswith(f"system busy: {key}=2: ") for reply in replies)
        await trio.testing.wait_all_tasks_blocked()
        stats = server.reactor.stats
        assert (stats.inflight, stats.busy, stats.frames) == (2 + oneways, 2 + dropped, 5)
        assert stats.limited == {key: stats.busy}
        assert keeper.looked_at == [1, 2]
        assert sorted(command.opaque for _, command in keeper.kept) == ([1, 2] if dropped else [1, 2, 4])
        keeper.gate.set()
        if not as_task:
            for connection, command in keeper.kept[:2]:
                connection.complete(command.reply())
        assert sorted([(await peer.receive()).opaque, (await peer.receive()).opaque]) == [1, 2]
        await until(server, "s.inflight == 0")
        await peer.send_bytes(plain(6))
        await until(server, "s.frames == 6")
        assert keeper.looked_at == [1, 2, 6]


@ONE_BY_ONE
async def test_a_fast_handler_that_uses_up_the_limit_leaves_no_more_than_system_busy(one_by_one: bool) -> None:
    """The limits hold when the full handler is called, whatever has happened since they were checked."""
    handlers = Handlers()

    def fast(connection: Connection, _request: TypedRequest[Any]) -> None:
        connection.begin()

    table = HandlerTable()
    table.register(CODE, handlers.serve_full, header=Fields, fast=fast)
    limits = ReactorLimits(max_inflight_per_connection=1)
    async with serving(table, limits) as server, server.peer() as peer:
        await send(server, peer, [plain(1)] if one_by_one else [plain(1), plain(2)], one_by_one=one_by_one)
        assert (await peer.receive()).code == ResponseCode.SYSTEM_BUSY
    assert handlers.full == []


@ONE_BY_ONE
async def test_what_a_fast_handler_defers_is_in_flight(one_by_one: bool) -> None:
    kept: list[tuple[Connection, int]] = []

    def fast(connection: Connection, request: TypedRequest[Any]) -> Literal[Later.DEFERRED]:
        kept.append((connection, request.opaque))
        return DEFERRED

    table = HandlerTable()
    table.register(CODE, Handlers().serve_full, header=Fields, fast=fast)
    async with serving(table) as server, server.peer() as peer:
        await send(server, peer, [plain(1), plain(2)], one_by_one=one_by_one)
        await until(server, "s.frames == 2")
        assert server.reactor.stats.inflight == server.connection().inflight == 2
        for connection, opaque in kept:
            connection.complete(encode(RemotingCommand(CODE, opaque).reply()))
        assert [(await peer.receive()).opaque for _ in range(2)] == [1, 2]
        assert server.reactor.stats.inflight == 0


# the end of a connection


@ONE_BY_ONE
async def test_nothing_is_served_after_a_full_handler_has_closed_the_connection(one_by_one: bool) -> None:
    calls = itertools.count(1)

    def full(connection: Connection, _command: RemotingCommand) -> Outcome:
        next(calls)
        connection.close("enough")
        return None

    table = HandlerTable()
    table.register(CODE, full, header=Fields, fast=lambda *_: None)
    async with serving(table) as server, server.peer() as peer:
        await peer.send_bytes(plain(1) if one_by_one else plain(1) * 3)
        assert await peer.is_closed_by_server()
        assert server.reactor.stats.frames == 1
    assert next(calls) == 2


BROKEN = {
    "a remark that is no text": b'{"code":100,"extFields":{"word":"fast"},"remark":5}',
    "a NaN": b'{"code":100,"extFields":{"word":"fast"},"version":NaN}',
    "deep": b'{"code":100,"extFields":{"word":"fast","x":%b}}' % (b"[" * 1_000_000 + b"]" * 1_000_000),
    "hostile": b'{"code":100,"extFields":{"word":"fast"},"~ext":5}',
    "cut off": b'{"code":100,"extFields":{"word":"fast"}',
}


@ONE_BY_ONE
@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_header_ends_its_connection_as_without_a_fast_handler(name: str, one_by_one: bool) -> None:
    handlers = Handlers()
    without = HandlerTable()
    without.register(CODE, handlers.serve_full)
    for table in (handlers.table(), without):
        async with serving(table) as server, server.peer() as peer:
            await peer.send_bytes(frame(BROKEN[name]) if one_by_one else plain(1, flag=2) + frame(BROKEN[name]))
            assert await peer.is_closed_by_server()
            assert server.reactor.stats.broken == 1
    assert [given.opaque for given in handlers.full] == ([] if one_by_one else [1, 1])


@ONE_BY_ONE
@pytest.mark.parametrize("word", [0, 1, 11, 12, 100, 2**24 - 1, Encoding.ROCKETMQ << 24 | 39, 9 << 24 | 39])
async def test_a_header_word_that_does_not_fit_what_looks_like_json(word: int, one_by_one: bool) -> None:
    """The header word gives a length that is too small or exceeds the frame, or another encoding."""
    handlers = Handlers()
    text = b'{"code":100,"extFields":{"word":"fast"}}'
    async with serving(handlers.table()) as server, server.peer() as peer:
        view = server.reactor.intake.view
        view[:] = b" " * len(view)  # bytes of earlier frames: JSON may end with blanks
        await peer.send_bytes(
            (b"" if one_by_one else plain(1, flag=2)) + struct.pack(">II", 4 + len(text), word) + text
        )
        assert await peer.is_closed_by_server()
    assert handlers.fast == [given.opaque for given in handlers.full] == ([] if one_by_one else [1])
