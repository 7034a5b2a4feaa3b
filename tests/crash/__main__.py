"""``python -m tests.crash``: the crash enumeration for many seeds, or a replay of one state or fault."""

import sys

import click

from tests.crash import faults
from tests.crash.enumeration import BrokenStateError, Enumeration, State, enumerate_states, in_processes


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


@click.command()
@click.option("--seeds", default="1-20", show_default=True, help="Scripts to run, as 7 or 1-20.")
@click.option("--second", default=10, show_default=True, help="Cuts of each recovery, at most 10.")
@click.option("--workers", type=int, help="Number of processes; by default one for each core.")
@click.option(
    "--replay", help="A state (1:300:PAGES, 1:300:PAGES+40:ALL) or a fault (1:0:17:EIO) from a failure's message."
)
def main(seeds: str, second: int, workers: int | None, replay: str | None) -> None:
    """Cut the power, and let the call fail, at every disk call of the script."""
    try:
        if replay is not None:
            _again(replay)
        else:
            _all(_seeds(seeds), second, workers)
    except BrokenStateError as error:
        sys.stdout.write(f"{error}\n")
        sys.exit(1)


def _again(text: str) -> None:
    if text.rpartition(":")[2] in faults.ERRORS:
        fault = faults.Fault.parse(text)
        faults.Faults(fault.seed).check(fault)
    else:
        state = State.parse(text)
        Enumeration(state.seed).replay(state)
    sys.stdout.write(f"{text}: every promise is kept\n")


def _all(seeds: list[int], second: int, workers: int | None) -> None:
    states = 0
    for seed, tally in zip(seeds, enumerate_states(seeds, second=second, workers=workers), strict=True):
        states += tally.states
        sys.stdout.write(f"seed {seed}: {tally}\n")
        sys.stdout.flush()
    for seed, found in zip(seeds, in_processes(faults.part_of, [(seed, 0, 1) for seed in seeds], workers), strict=True):
        sys.stdout.write(f"seed {seed}: {found}\n")
    sys.stdout.write(f"{states} states, every promise is kept\n")


if __name__ == "__main__":
    main()
