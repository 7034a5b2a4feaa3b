"""Reads of the provider that do not return: who waits gets an error, and others have their turn."""

from typing import Self

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import wait_all_tasks_blocked

from trimq.broker.store.tiered.access.timed_reads import (
    MOST_HANGING,
    MOST_READS,
    TierHangsError,
    TimedReads,
)
from trimq.remoting.runtime.clock import ManualClock

LIMIT_MS = 10_000


class Provider:
    """Reads wait for the event of their number, if there is one; they cannot be cancelled, as threads cannot.

    As a context manager it lets all of them return at the end.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self.gates.values():
            gate.set()

    def __init__(self) -> None:
        self.gates: dict[int, trio.Event] = {}
        self.begun: list[int] = []

    async def read(self, number: int) -> int:
        self.begun.append(number)
        with trio.CancelScope(shield=True):
            if number in self.gates:
                await self.gates[number].wait()
        return number


async def test_a_read_that_hangs_is_an_error_and_others_go_on() -> None:
    clock, provider = ManualClock(), Provider()
    reads = TimedReads(clock, LIMIT_MS)
    errors: list[str] = []

    async def hangs(queue: str, number: int) -> None:
        provider.gates[number] = trio.Event()
        with pytest.raises(TierHangsError) as found:
            await reads.read(queue, provider.read, number)
        errors.append(str(found.value))

    async with trio.open_nursery() as nursery:
        with provider:
            nursery.start_soon(reads.run)
            await wait_all_tasks_blocked()
            with capture_logs() as logs:
                for number in range(2):
                    nursery.start_soon(hangs, f"q{number}", number)
                await wait_all_tasks_blocked()
                clock.advance(9)
                await wait_all_tasks_blocked()
                assert (errors, reads.hanging) == ([], 0)
                clock.advance(3.5)
                await wait_all_tasks_blocked()
                assert (len(errors), reads.hanging, reads.timeouts) == (2, 2, 2)
                assert "not answered within 10 s" in errors[0]
                with pytest.raises(TierHangsError, match="have not returned"):
                    await reads.read("q0", provider.read, 7)
                assert reads.refused == 1
                assert await reads.read("q7", provider.read, 7) == 7
                assert [(entry["event"], entry["log_level"]) for entry in logs] == [("tiered_reads_hang", "error")]
                for gate in provider.gates.values():
                    gate.set()
                await wait_all_tasks_blocked()
                assert [entry["event"] for entry in logs][1:] == ["tiered_reads_resumed"]
                assert reads.hanging == 0
                assert await reads.read("q0", provider.read, 8) == 8
                assert (reads.timeouts, reads.refused) == (2, 1)
            nursery.cancel_scope.cancel()


async def test_with_many_that_hang_no_further_read_begins() -> None:
    clock, provider = ManualClock(), Provider()
    reads = TimedReads(clock, LIMIT_MS)

    async def hangs(number: int) -> None:
        provider.gates[number] = trio.Event()
        with pytest.raises(TierHangsError):
            await reads.read(f"q{number}", provider.read, number)

    async with trio.open_nursery() as nursery:
        with provider:
            nursery.start_soon(reads.run)
            await wait_all_tasks_blocked()
            for number in range(MOST_HANGING):
                nursery.start_soon(hangs, number)
            await wait_all_tasks_blocked()
            clock.advance(12.5)
            await wait_all_tasks_blocked()
            with pytest.raises(TierHangsError):
                await reads.read("another", provider.read, 99)
            assert sorted(provider.begun) == list(range(MOST_HANGING))
            provider.gates[0].set()
            await wait_all_tasks_blocked()
            assert await reads.read("another", provider.read, 99) == 99
            for gate in provider.gates.values():
                gate.set()
            nursery.cancel_scope.cancel()


async def test_what_a_read_raises_comes_through_and_a_stop_ends_who_waits() -> None:
    reads = TimedReads(ManualClock(), LIMIT_MS)

    async def fails(error: Exception) -> None:
        await trio.lowlevel.checkpoint()
        raise error

    ended = []

    async def waits() -> None:
        with pytest.raises(OSError, match="closed"):
            await reads.read("q", trio.sleep_forever)
        ended.append(1)

    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reads.run)
            await wait_all_tasks_blocked()
            for error in (OSError(5, "x"), LookupError("y")):
                with pytest.raises(type(error)):
                    await reads.read("q", fails, error)
            outer.start_soon(waits)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert ended == [1]
        assert await reads.read("q", Provider().read, 3) == 3


async def test_reads_that_hang_leave_threads_to_uploads() -> None:
    """Six reads run at a time: the others wait, within their own limit, and do not hang."""
    clock, provider = ManualClock(), Provider()
    reads = TimedReads(clock, LIMIT_MS)
    errors: list[int] = []

    async def hangs(number: int) -> None:
        try:
            await reads.read("q0", provider.read, number)
        except TierHangsError:
            errors.append(number)

    async with trio.open_nursery() as nursery:
        with provider:
            nursery.start_soon(reads.run)
            await wait_all_tasks_blocked()
            for number in range(9):
                provider.gates[number] = trio.Event()
                nursery.start_soon(hangs, number)
            await wait_all_tasks_blocked()
            assert len(provider.begun) == MOST_READS
            first = provider.begun[0]
            provider.gates[first].set()
            await wait_all_tasks_blocked()
            assert len(provider.begun) == MOST_READS + 1
            clock.advance(13)
            await wait_all_tasks_blocked()
            assert sorted(errors) == [number for number in range(9) if number != first]
            assert reads.hanging == MOST_READS
        await wait_all_tasks_blocked()
        assert reads.hanging == 0
        assert await reads.read("q0", provider.read, 50) == 50
        nursery.cancel_scope.cancel()


async def test_an_unexpected_error_is_the_readers() -> None:
    reads = TimedReads(ManualClock(), LIMIT_MS)

    async def broken() -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reads.run)
        await wait_all_tasks_blocked()
        with pytest.raises(ZeroDivisionError):
            await reads.read("q0", broken)
        assert await reads.read("q0", Provider().read, 5) == 5
        nursery.cancel_scope.cancel()
