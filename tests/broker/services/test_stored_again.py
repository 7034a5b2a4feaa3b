"""Puts of messages that the broker stores again, and what a cancellation does to one that is under way."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.store.builders import message
from trimq.broker.services.stored_again import put_again
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus

STORED = PutMessageResult(PutMessageStatus.PUT_OK)


class Puts:
    """A store that answers at once with ``result``, or when the test does."""

    def __init__(self, result: PutMessageResult | None = None) -> None:
        self.result = result
        self.waiting: list[PutCallback] = []

    def put_message(self, message: MessageInner, on_done: PutCallback) -> PutMessageResult | None:
        self.waiting.append(on_done)
        return self.result


async def test_what_is_stored_at_once(autojump_clock: trio.testing.MockClock) -> None:
    heard: list[PutMessageResult] = []
    assert await put_again(Puts(STORED), message(b"x", "T"), heard.append) is STORED
    assert heard == [STORED]


@pytest.mark.parametrize("after", [0.0, 1.9])
async def test_a_record_that_is_stored_soon_after_a_cancellation_counts(
    after: float, autojump_clock: trio.testing.MockClock
) -> None:
    store, found = Puts(), []

    async def put() -> None:
        found.append(await put_again(store, message(b"x", "T")))

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(put)
                await trio.sleep(1)
                nursery.start_soon(_answer, store, after)
                scope.cancel()
    assert found == [STORED]


async def _answer(store: Puts, after: float) -> None:
    await trio.sleep(after)
    store.waiting[0](STORED)


async def test_a_put_that_is_never_answered_ends_with_its_task(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    with trio.move_on_after(1):
        await put_again(Puts(), message(b"x", "T"))
    assert trio.current_time() - began == pytest.approx(3, abs=0.1)
