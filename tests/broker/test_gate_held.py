"""Held pulls and the gate: a pull admitted on arrival is checked again before it is served under changed rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.broker.test_gate import FORMS, SENDS, TOPIC, Both, Counting, Form, both, code_first
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_messages
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Readiness, Sees

PULLS = frozenset({11, 361})


def texts(ext: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in ext.items()}


class Held:
    """A pull that waits for the next message of its queue."""

    def __init__(self, found: Both, client: WireClient, code: int, form: Form) -> None:
        self.found, self.client, self.code, self.form = found, client, code, form
        self.offset = found.broker.context.store.max_offset(TOPIC, 0)
        self.ext = texts(pull_ext(TOPIC, self.offset, sysFlag=6))
        self.opaque = found.next()

    async def reply(self) -> RemotingCommand:
        return await self.client.reply(self.opaque)

    async def again(self) -> RemotingCommand:
        return await self.found.ask(self.client, self.form, self.code, self.ext, b"")

    async def is_to_ask_again(self) -> bool:
        """Whether the reply has no messages and sends the client back to the same offset."""
        reply = await self.reply()
        assert (reply.code, reply.body) == (ResponseCode.PULL_NOT_FOUND, b""), reply.remark
        ext = reply.ext_fields()
        assert (ext["nextBeginOffset"], ext["maxOffset"]) == (str(self.offset), str(self.offset))
        assert self.client.replies == {}
        return True


async def hold(found: Both, client: WireClient, code: int = 11, form: Form = code_first) -> Held:
    held = Held(found, client, code, form)
    holds = found.broker.context.long_polling
    before = holds.held
    await client.stream.send_all(form(code, held.opaque, held.ext, b""))
    with trio.fail_after(5):
        while holds.held == before:
            await trio.lowlevel.checkpoint()
    return held


async def send(found: Both) -> None:
    """Send a message to the queue on the port without pulls."""
    ext = texts(send_ext(TOPIC, {"UNIQ_KEY": "A"}))
    assert (await found.ask(found.clients[1], code_first, RequestCode.SEND_MESSAGE_V2, ext, b"news")).code == 0


async def is_found(held: Held) -> bool:
    reply = await held.reply()
    assert reply.code == 0, reply.remark
    (message,) = decode_messages(bytes(reply.body))
    return message.body == b"news"


def transferred(found: Both) -> int:
    return found.broker.context.store.stats.transferred_messages_total


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]])
@pytest.mark.parametrize("code", sorted(PULLS))
@pytest.mark.parametrize("notified", [True, False], ids=["", "they were not notified"])
async def test_a_feature_that_came_while_it_was_held_sees_it(
    tmp_path: Path, code: int, form: Form, notified: bool
) -> None:
    async with both(tmp_path) as found:
        gate, holds = found.broker.gate, found.broker.context.long_polling
        if not notified:  # then the message wakes them
            gate.listeners.remove(holds.wake_all)
        client = found.clients[0]
        held = await hold(found, client, code, form)
        before = transferred(found)
        veto = Counting(codes=PULLS)
        veto.fails = True
        gate.register(veto.feature)
        if not notified:
            await trio.testing.wait_all_tasks_blocked()
            assert client.replies == {}
        await send(found)
        assert await held.is_to_ask_again()
        refused = await held.again()
        assert (refused.code, refused.remark, refused.body) == (ResponseCode.NO_PERMISSION, "vetoed", b"")
        assert transferred(found) == before
        assert held.opaque not in veto.seen


@pytest.mark.parametrize("what", ["registered", "removed", "changed"])
async def test_held_pulls_are_woken_when_the_features_change(tmp_path: Path, what: str) -> None:
    """Without a message, and long before their timeout."""
    async with both(tmp_path) as found:
        gate, counting = found.broker.gate, Counting()
        if what != "registered":
            gate.register(counting.feature)
        held = await hold(found, found.clients[0])
        actions: dict[str, Callable[[], None]] = {
            "registered": lambda: gate.register(counting.feature),
            "removed": lambda: gate.remove(counting.feature),
            "changed": gate.changed,
        }
        actions[what]()
        assert await held.is_to_ask_again()
        assert found.broker.context.long_polling.held == 0


@pytest.mark.parametrize(("before", "then"), [(True, True), (True, False), (False, False), (False, True)])
async def test_a_state_that_is_another_when_it_is_served(tmp_path: Path, before: bool, then: bool) -> None:
    async with both(tmp_path) as found:
        ready, others = Readiness(is_set=before), Readiness()
        counting = Counting(Sees.READINESS, codes=PULLS, readiness=ready)
        found.broker.gate.register(counting.feature)
        found.broker.gate.register(Counting(Sees.READINESS, codes=SENDS, readiness=others).feature)
        held = await hold(found, found.clients[0])
        handed_out = transferred(found)
        ready.is_set = then
        others.is_set = True  # the state of other clients only
        counting.fails = not then
        await send(found)
        if before == then:
            assert await is_found(held)
        else:
            assert await held.is_to_ask_again()
            assert transferred(found) == handed_out
            assert (await held.again()).code == (0 if then else ResponseCode.NO_PERMISSION)


async def test_an_admission_that_is_taken_back_while_it_is_held(tmp_path: Path) -> None:
    """Another client's held pull is not affected."""
    async with both(tmp_path) as found, WireClient.connect(found.broker.endpoint) as other:
        client, gate = found.clients[0], found.broker.gate
        connections = [found.connection(client), found.connection(other)]
        known: set[Connection] = set(connections)
        counting = Counting(Sees.IDENTITY, codes=PULLS, admits=known.__contains__)
        gate.register(counting.feature)
        assert all(map(gate.admit, connections))
        mine, its = await hold(found, client), await hold(found, other)
        counting.fails = True
        known.discard(connections[0])
        assert not gate.admit(connections[0])
        await send(found)
        assert await is_found(its)
        assert await mine.is_to_ask_again()
        assert (await mine.again()).code == ResponseCode.NO_PERMISSION
        assert (await its.again()).code == 0


async def test_one_without_an_admission_is_served_as_it_was_let_through(tmp_path: Path) -> None:
    """A feature that has seen the pull and has not changed since need not see it a second time."""
    async with both(tmp_path) as found:
        counting = Counting(Sees.IDENTITY, admits=lambda _: False)
        found.broker.gate.register(counting.feature)
        held = await hold(found, found.clients[0])
        await send(found)
        assert await is_found(held)
        assert counting.seen[held.opaque] == 1


async def test_a_feature_that_came_while_the_pull_was_read_for_sees_it(tmp_path: Path) -> None:
    """It is held under the gate's decision on its arrival, not the one when no message was found."""
    async with both(tmp_path) as found:
        store: Any = found.broker.context.store
        usual = store.get_message, store.get_message_cold
        veto = Counting(codes=PULLS)
        veto.fails = True

        async def cold(_topic: str, _queue: int, offset: int, *_: Any) -> GetMessageResult:
            store.get_message, store.get_message_cold = usual
            found.broker.gate.register(veto.feature)
            return GetMessageResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, 0, offset)

        store.get_message, store.get_message_cold = lambda *_: None, cold
        before = transferred(found)
        held = await hold(found, found.clients[0])
        await send(found)
        assert await held.is_to_ask_again()
        assert transferred(found) == before
