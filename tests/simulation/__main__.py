"""``python -m tests.simulation``: simulate the clusters of many seeds, or of one again with its trace."""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Final

import click

from tests.simulation.breaks import BREAKS
from tests.simulation.world import Outcome, many, simulate

_SEEDS_OF_A_CHILD: Final = 25
"""Seeds of one child process. It ends without collecting its garbage, which takes a tenth of a simulation's time."""


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
    low, _, high = seeds.partition("-")
    begin, end = int(low), int(high or low) + 1
    if workers > 1 or os.environ.get("PYTHONHASHSEED") != "0":
        options = [
            *["--twice"] * twice,
            *["--trace"] * trace,
            *["--first"] * first,
            *(["--break", broken] if broken else []),
        ]
        sys.exit(_in_processes(begin, end, workers, options))
    with many(), BREAKS[broken]() if broken else nullcontext():
        sys.exit(_run(range(begin, end), twice=twice, trace=trace, first=first))


def _in_processes(begin: int, end: int, workers: int, options: list[str]) -> int:
    """Divide the seeds over processes. Returns the exit code."""
    step = -(-(end - begin) // workers)
    parts = [f"{at}-{min(at + step, end) - 1}" for at in range(begin, end, step)]
    command = [sys.executable, "-m", "tests.simulation", "--workers", "1", *options, "--seeds"]
    # What happens follows from the order of sets of texts too, and that from the hash seed.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    running = [subprocess.Popen([*command, part], env=environment) for part in parts]
    return max([process.wait() for process in running])


def _run(seeds: range, *, twice: bool, trace: bool, first: bool) -> int:
    began, run, failed = time.perf_counter(), 0, 0
    for at in range(0, len(seeds), _SEEDS_OF_A_CHILD):
        part = seeds[at : at + _SEEDS_OF_A_CHILD]
        try:
            more, failures = in_child(partial(_run_part, part, twice=twice, trace=trace, first=first))
        except RuntimeError as error:
            click.echo(f"seeds {part[0]}-{part[-1]} FAILED: {error}")
            more, failures = 0, 1
        run, failed = run + more, failed + failures
        if failed and first:
            break
    seconds = time.perf_counter() - began
    runs = run * (1 + twice)
    click.echo(f"{runs} simulations in {seconds:.1f} s, {runs / seconds:.1f} a second; {failed} failed")
    return int(failed > 0)


def in_child(function: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Call a function in a copy of this process, and return what it returns. Raises RuntimeError if it fails."""
    sys.stdout.flush()
    result, answer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.write(answer, "{} {}".format(*function()).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not go on with what its parent does
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(answer)
    with os.fdopen(result) as text:
        found = text.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise RuntimeError(f"a child process ended with {code}")
    run, failed = found.split()
    return int(run), int(failed)


def _run_part(seeds: range, *, twice: bool, trace: bool, first: bool) -> tuple[int, int]:
    """Returns how many seeds were run, and how many of them failed."""
    run = failed = 0
    for seed in seeds:
        if failed and first:
            break
        run += 1
        try:
            outcome = simulate(seed, keeps=trace)
        except Exception as error:  # noqa: BLE001 - every failure of a seed is reported
            failed += 1
            click.echo(f"seed {seed} FAILED: {_why(error)}")
            for note in error.__notes__:
                click.echo(note)
            continue
        if trace:
            click.echo("\n".join([*outcome.trace.lines, str(outcome)]))
        if twice and (again := simulate(seed)).trace.digest != outcome.trace.digest:
            failed += 1
            click.echo(f"seed {seed} FAILED: not the same happened again\n{_difference(outcome, again)}")
    return run, failed


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
