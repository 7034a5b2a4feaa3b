"""``python -m tests.simulation``: simulate the clusters of many seeds, or of one again with its trace."""

import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import click
import msgspec

from tests.simulation.breaks import BREAKS
from tests.simulation.world import Outcome, many, simulate

_SEEDS_OF_A_CHILD: Final = 25
"""Seeds of one child process. It ends without collecting its garbage, which takes a tenth of a simulation's time."""
_SEEDS_OF_A_SHORT_CHILD: Final = 5
"""The same if the first failure ends all: what the others do then is lost."""


@click.command()
@click.option("--seeds", default="0-499", show_default=True, help="Seeds to run, as 7 or 0-499.")
@click.option("--twice", is_flag=True, help="Run each seed twice: the same has to happen.")
@click.option("--trace", is_flag=True, help="Print the events of each seed.")
@click.option("--first", is_flag=True, help="Stop at the first failure.")
@click.option("--workers", default=os.cpu_count() or 1, show_default="one for each core", help="Number of processes.")
@click.option("--break", "broken", type=click.Choice(sorted(BREAKS)), help="Break the broker in this way first.")
def main(seeds: str, twice: bool, trace: bool, first: bool, workers: int, broken: str | None) -> None:
    """Simulate clusters under faults. The exit code is 1 if one breaks a promise."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported: its threads would only wait
    if os.environ.get("PYTHONHASHSEED") != "0":
        # What happens follows from the order of sets of texts too, and that from the hash seed.
        arguments = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | {"PYTHONHASHSEED": "0"})
    low, _, high = seeds.partition("-")
    with many(), BREAKS[broken]() if broken else nullcontext():
        sys.exit(_run(range(int(low), int(high or low) + 1), workers, twice=twice, trace=trace, first=first))


def _run(seeds: range, workers: int, *, twice: bool, trace: bool, first: bool) -> int:
    """Returns the exit code."""
    began, run, failed = time.perf_counter(), 0, 0
    step = _SEEDS_OF_A_SHORT_CHILD if first else _SEEDS_OF_A_CHILD
    parts = [seeds[at : at + step] for at in range(0, len(seeds), step)]
    calls = [partial(_run_part, part, twice=twice, trace=trace, first=first) for part in parts]
    with closing(in_children(calls, workers)) as results:
        for number, result in results:
            if result is None:
                click.echo(f"seeds {parts[number][0]}-{parts[number][-1]} FAILED: a child process ended with an error")
                failed += 1
            else:
                click.echo(result.text, nl=False)
                run, failed = run + result.run, failed + result.failed
            if failed and first:
                break
    seconds = time.perf_counter() - began
    runs = run * (1 + twice)
    click.echo(f"{runs} simulations in {seconds:.1f} s, {runs / seconds:.1f} a second; {failed} failed")
    return int(failed > 0)


class Result(NamedTuple):
    """What a part of the seeds came to: how many were run, how many of them failed, and what there is to say."""

    run: int
    failed: int
    text: str


@dataclass
class _Child:
    number: int
    pid: int
    printed: bytearray = field(default_factory=bytearray)


def in_children(
    calls: Sequence[Callable[[], Result]], workers: int
) -> Generator[tuple[int, Result | None], None, None]:
    """Make each call in a copy of this process, ``workers`` at a time.

    Yields the number of a call with its result as soon as it is there; None if the child failed. Children that still
    run are killed when the caller wants no more.
    """
    waiting = deque(enumerate(calls))
    with selectors.DefaultSelector() as running:
        try:
            while waiting or running.get_map():
                while waiting and len(running.get_map()) < workers:
                    number, call = waiting.popleft()
                    pid, answer = _fork(call)
                    running.register(answer, selectors.EVENT_READ, _Child(number, pid))
                for key, _ in running.select():
                    child: _Child = key.data
                    if data := os.read(key.fd, 1 << 20):
                        child.printed += data
                        continue
                    _forget(running, key)
                    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
                    yield child.number, None if code else msgspec.json.decode(child.printed, type=Result)
        finally:
            for key in list(running.get_map().values()):
                os.kill(key.data.pid, signal.SIGKILL)
                _forget(running, key)
                os.waitpid(key.data.pid, 0)


def _forget(running: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    running.unregister(key.fd)
    os.close(key.fd)


def _fork(call: Callable[[], Result]) -> tuple[int, int]:
    """Call a function in a copy of this process. Returns its id, and a pipe with the result as JSON."""
    sys.stdout.flush()
    result, answer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            with os.fdopen(answer, "wb") as pipe:
                pipe.write(msgspec.json.encode(call()))
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not go on with what its parent does
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(answer)
    return pid, result


def _run_part(seeds: range, *, twice: bool, trace: bool, first: bool) -> Result:
    run = failed = 0
    lines: list[str] = []
    for seed in seeds:
        if failed and first:
            break
        run += 1
        try:
            outcome = simulate(seed, keeps=trace)
        except Exception as error:  # noqa: BLE001 - every failure of a seed is reported
            failed += 1
            lines += [f"seed {seed} FAILED: {_why(error)}", *error.__notes__]
            continue
        if trace:
            lines += [*outcome.trace.lines, str(outcome)]
        if twice and (again := simulate(seed)).trace.digest != outcome.trace.digest:
            failed += 1
            lines.append(f"seed {seed} FAILED: not the same happened again\n{_difference(outcome, again)}")
    return Result(run, failed, "".join(f"{line}\n" for line in lines))


def _why(error: BaseException) -> str:
    """The errors inside groups."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_why(inner) for inner in error.exceptions)
    return f"{type(error).__name__}: {error}"


def _difference(outcome: Outcome, again: Outcome) -> str:
    """The first event in which two runs of a seed differ."""
    one, other = (simulate(found.seed, keeps=True).trace.lines for found in (outcome, again))
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return "\n".join([*one[max(0, at - 5) : at], f"- {left}", f"+ {right}"])
    return "they did not differ in two further runs"


if __name__ == "__main__":
    main()
