"""``python -m tests.crash.mutations``: apply every mutation and check that the tests detect it."""

import os
import sys
import tempfile
from pathlib import Path

import click

from tests.crash.mutations import (
    Mutation,
    MutationError,
    Outcome,
    all_mutations,
    build_extension,
    can_build_extension,
    copied_tree,
    has_extension,
    interpreter,
    marks_for,
    run_tests,
    try_mutation,
)

_NEEDED = 0.9  # 36 of 40


@click.command()
@click.argument("names", nargs=-1)
@click.option("--timeout", default=600.0, show_default=True, help="Seconds that the tests of one mutation may take.")
@click.option("--verbose", is_flag=True, help="Print pytest's output for mutations that were not killed.")
def main(names: tuple[str, ...], timeout: float, verbose: bool) -> None:
    """Try all mutations, or those whose names (AREA/NN-SLUG) start with one of NAMES."""
    chosen = [one for one in all_mutations() if not names or one.name.startswith(names)]
    if not names and not os.environ.get("CI") and not can_build_extension():
        click.echo("mutations of the native extension are skipped")
        chosen = [one for one in chosen if not one.is_native]
    if not chosen:
        raise click.UsageError("no such mutation")
    try:
        with tempfile.TemporaryDirectory() as place, copied_tree(Path(place)) as tree:
            _without_mutation(chosen, tree)
            outcomes = [_try(mutation, tree, timeout, verbose=verbose) for mutation in chosen]
    except MutationError as error:
        sys.exit(str(error))
    sys.exit(_verdict(chosen, outcomes))


def _without_mutation(chosen: list[Mutation], tree: Path) -> None:
    """Run the chosen mutations' tests on the unchanged tree.

    A test that already fails there would seem to kill every mutation. Raises MutationError if one fails or cannot run.
    """
    if any(mutation.is_native for mutation in chosen):
        why = build_extension(tree)
        if why or not has_extension(tree):
            raise MutationError(f"{why}\nthe native extension cannot be built, or the tests would use another one")
    for environment, native in sorted({(mutation.environment, mutation.is_native) for mutation in chosen}):
        own = [one for one in chosen if (one.environment, one.is_native) == (environment, native)]
        tests = sorted({test for one in own for test in one.tests})
        code, printed = run_tests(interpreter(environment), tree, tests, 3600, marks_for(environment), native=native)
        if code != 0:
            raise MutationError(f"{printed}\nthese tests fail without any mutation")


def _try(mutation: Mutation, tree: Path, timeout: float, *, verbose: bool) -> Outcome:
    outcome, printed = try_mutation(mutation, tree, timeout)
    click.echo(f"{mutation.name:58} {outcome.value}")
    if not outcome.is_killed and (verbose or outcome is Outcome.BROKEN):
        click.echo(printed)
    return outcome


def _verdict(chosen: list[Mutation], outcomes: list[Outcome]) -> int:
    """The exit code: 0 if enough mutations are killed and each survivor has a documented reason."""
    killed = sum(outcome.is_killed for outcome in outcomes)
    wrong = False
    for mutation, outcome in zip(chosen, outcomes, strict=True):
        if outcome is Outcome.SURVIVED:
            click.echo(f"{mutation.name} survives: {mutation.survives or 'NO REASON GIVEN'}")
            wrong |= not mutation.survives
        elif mutation.survives:
            click.echo(f"{mutation.name} is documented to survive, but: {outcome.value}")
            wrong = True
        wrong |= outcome is Outcome.BROKEN
    click.echo(f"{killed} of {len(chosen)} mutations are killed")
    return int(wrong or killed < _NEEDED * len(chosen))


if __name__ == "__main__":
    main()
