"""Fast handlers: requests that are decoded in one pass with their header."""

from typing import Literal

import pytest
from msgspec import Struct

from tests.remoting.harness import echo, serving, until
from tests.remoting.harness import request as any_request
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.handler_table import HandlerTable, json_front
from trimq.remoting.server.handlers import DEFERRED, FastHandler, Later
from trimq.remoting.server.limits import ReactorLimits
from trimq.remoting.server.reactor import Connection

ECHO = 100


class Fields(Struct):
    word: str
    other: int = 0


def request(body: bytes = b"", encoding: Encoding = Encoding.JSON, **fields: str) -> RemotingCommand:
    return any_request(ECHO, body, encoding=encoding, ext={"word": "w"} | fields)


def table(handler: FastHandler) -> HandlerTable:
    made = HandlerTable()
    made.register(ECHO, echo, header=Fields, fast=handler)
    return made


def answered(asked: TypedRequest[Fields], text: bytes) -> bytes:
    return encode(RemotingCommand(ECHO, asked.opaque).reply(body=text))


async def test_it_gets_header_and_body_and_its_replies_keep_their_order() -> None:
    def fast(_connection: Connection, asked: TypedRequest[Fields]) -> bytes | None:
        return answered(asked, b"fast " + bytes(asked.body)) if bytes(asked.body) != b"pass" else None

    async with serving(table(fast)) as server, server.peer() as peer:
        await peer.send(request(body=b"one"), request(body=b"pass"), request(body=b"two"))
        replies = sorted([await peer.receive() for _ in range(3)], key=lambda reply: reply.opaque)
        assert [bytes(reply.body) for reply in replies] == [b"fast one", b"pass", b"fast two"]
        assert server.reactor.stats.frames == 3


@pytest.mark.parametrize("encoding", [Encoding.ROCKETMQ, Encoding.MSGPACK])
async def test_other_encodings_do_not_get_there(encoding: Encoding) -> None:
    def fast(*_: object) -> bytes | None:
        raise AssertionError

    async with serving(table(fast)) as server, server.peer() as peer:
        reply = await peer.ask(request(body=b"x", encoding=encoding))
        assert (reply.code, reply.body) == (0, b"x")


async def test_what_it_raises_becomes_a_reply_and_is_not_served_again() -> None:
    def fast(*_: object) -> bytes | None:
        raise ValueError("broken")

    async with serving(table(fast)) as server, server.peer() as peer:
        reply = await peer.ask(request(body=b"x"))
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "broken" in (reply.remark or "")
        assert server.reactor.stats.failures == 1


async def test_a_deferred_one_counts_and_beyond_the_limit_the_other_handler_decides() -> None:
    waiting: list[tuple[Connection, int]] = []

    def fast(connection: Connection, asked: TypedRequest[Fields]) -> Literal[Later.DEFERRED]:
        waiting.append((connection, asked.opaque))
        return DEFERRED

    limits = ReactorLimits(max_inflight_per_connection=1)
    async with serving(table(fast), limits) as server, server.peer() as peer:
        first = request()
        await peer.send(first)
        await until(server, "s.inflight == 1")
        assert (await peer.ask(request())).code == ResponseCode.SYSTEM_BUSY
        ((connection, opaque),) = waiting
        connection.complete(encode(RemotingCommand(ECHO, opaque).reply()))
        assert (await peer.receive()).opaque == first.opaque
        assert server.reactor.stats.inflight == 0


@pytest.mark.parametrize("code", [1, 9, 1000, 500_000])
def test_codes_that_the_prefix_cannot_distinguish(code: int) -> None:
    with pytest.raises(ValueError, match="cannot have a fast path"):
        json_front(code)


def test_a_table_without_a_code_has_no_direct_handler_of_it() -> None:
    made = table(lambda *_: None)
    made.register(310, echo, header=Fields, fast=lambda *_: None)
    assert set(made.without(ECHO).fast) == {json_front(310)}


@pytest.mark.parametrize("over", [0, 1])
async def test_the_longest_frame(over: int) -> None:
    """A frame that is one byte too long closes its connection, even if nothing else has arrived."""
    longest = 400

    def fast(_connection: Connection, asked: TypedRequest[Fields]) -> bytes | None:
        return answered(asked, b"%d" % len(asked.body))

    async with serving(table(fast), ReactorLimits(max_frame=longest)) as server, server.peer() as peer:
        command = request()
        command.body = bytes(longest + over - len(encode(command)))
        assert len(encode(command)) == longest + over
        await peer.send(command)
        if over:
            assert await peer.is_closed_by_server()
        else:
            assert (await peer.receive()).body == b"%d" % len(command.body)
