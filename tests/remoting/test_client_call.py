"""Waiting for replies and batches with the low-level calls of each loop, which leave cancellation to the caller."""

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel

from trimq.remoting.client.call import running_loop

Main = Callable[[], Awaitable[None]]


def test_a_crowd_is_woken_together_and_those_who_come_later_wait_for_the_next_time(
    run: Callable[[Main], None],
) -> None:
    async def main() -> None:
        crowd, woken = running_loop().crowd(), []

        async def wait(name: str) -> None:
            await crowd.wait()
            woken.append(name)

        crowd.wake()  # no task waits
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(wait, name)
            await anyio.wait_all_tasks_blocked()
            assert woken == []
            crowd.wake()
            group.start_soon(wait, "late")
            await anyio.wait_all_tasks_blocked()
            assert sorted(woken) == ["a", "b", "c"]
            crowd.wake()
        assert woken[3:] == ["late"]

    run(main)


def test_who_is_cancelled_leaves_the_crowd_as_it_was(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        crowd, woken = running_loop().crowd(), []
        scopes = [anyio.CancelScope() for _ in range(3)]

        async def wait(number: int) -> None:
            with scopes[number]:
                await crowd.wait()
                woken.append(number)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
            scopes[1].cancel()
            crowd.wake()  # before the cancelled task has had a turn
        assert sorted(woken) == [0, 2]
        assert scopes[1].cancelled_caught

    run(main)


def test_who_was_cancelled_may_wait_in_the_same_crowd_again(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        crowd, woken = running_loop().crowd(), []
        scope, again = anyio.CancelScope(), anyio.CancelScope()

        async def wait() -> None:
            with scope:
                await crowd.wait()
            with again:
                await crowd.wait()
                woken.append("again")
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            assert scope.cancelled_caught
            crowd.wake()
        assert woken == ["again"]

    run(main)


def test_waiting_in_a_cancelled_scope_ends_at_once(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        crowd, call = running_loop().crowd(), running_loop().call()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await crowd.wait()
        assert scope.cancelled_caught
        with anyio.CancelScope() as scope:
            scope.cancel()
            await call.wait()
        assert scope.cancelled_caught
        crowd.wake()
        call.finish()
        with anyio.CancelScope() as scope:
            await call.wait()  # finished: nothing to wait for any more
        assert not scope.cancelled_caught

    run(main)


def test_a_call_wakes_its_task_once(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        call, woken = running_loop().call(), []

        async def wait() -> None:
            await call.wait()
            woken.append("once")
            await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            call.finish()
            call.finish()
        assert woken == ["once"]

    run(main)


def test_a_call_that_is_finished_after_its_task_was_cancelled_harms_no_task(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        call, over = running_loop().call(), anyio.Event()

        async def wait() -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await call.wait()
            await over.wait()

        scopes: list[anyio.CancelScope] = []
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            scopes[0].cancel()
            call.finish()
            await anyio.wait_all_tasks_blocked()
            call.finish()  # its task waits for something else by now
            await anyio.wait_all_tasks_blocked()
            over.set()

    run(main)
