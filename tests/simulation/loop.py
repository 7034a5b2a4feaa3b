"""trio's loop for simulations: trio's own ``unrolled_run`` without instruments, waits for the system and Ctrl-C.

Between two steps of tasks it does nothing but ask the clock. It takes the place of trio's while a simulation runs: see
``times.seeded``. The steps themselves are trio's, and so is their order: tasks that can run at the same time run in an
order that ``_r`` draws.
"""

from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any, Final

from outcome import Error, Value
from trio._core import _run
from trio._core._traps import CancelShieldedCheckpoint, WaitTaskRescheduled

_counter: Final = attrgetter("_counter")


def unrolled_run(
    runner: Any, function: Callable[..., Any], arguments: tuple[Any, ...], _host: bool = False
) -> Generator[float, Any, None]:
    """Run a main function. Yields times to wait for the system, at the end of a run only."""
    clock, deadlines, runnable, shuffle = runner.clock, runner.deadlines, runner.runq, _run._r.shuffle
    here: Any = _run.GLOBAL_RUN_CONTEXT
    reschedule = runner.reschedule
    try:
        clock.start_clock()
        runner.init_task = runner.spawn_impl(runner.init, (function, arguments), None, "<init>", system_task=True)
        while runner.tasks:
            if not runnable:
                timeout = clock.deadline_to_sleep_time(deadlines.next_deadline())
                if timeout:
                    runner.io_manager.process_events((yield timeout))
            heap = deadlines._heap
            if heap and heap[0][0] <= clock.now:
                deadlines.expire(clock.now)
            batch = list(runnable)
            runnable.clear()
            if len(batch) > 1:
                batch.sort(key=_counter)
                shuffle(batch)
            if not batch:
                continue
            while batch:
                here.task = task = batch.pop()
                send, value = task._next_send_fn, task._next_send
                task._next_send_fn = task._next_send = None
                message: Any = None
                end: Any = None
                try:
                    message = task.context.run(send, value)
                except StopIteration as stop:
                    end = Value(stop.value)
                except BaseException as error:  # noqa: BLE001 - it is what the task ends with
                    # Without the frame of this function, as trio does.
                    trace = error.__traceback__
                    end = Error(error.with_traceback(trace and trace.tb_next))
                    del trace
                if end is not None:
                    runner.task_exited(task, end)
                    continue
                task._schedule_points += 1
                if message is CancelShieldedCheckpoint:
                    reschedule(task)
                    continue
                assert type(message) is WaitTaskRescheduled, "detached coroutines are no part of a simulation"
                task._cancel_points += 1
                task._abort_func = message.abort_func
                if task._cancel_status.effectively_cancelled:
                    task._attempt_delivery_of_any_pending_cancel()
            del here.task
    finally:
        runner.close()
        here.__dict__.clear()
