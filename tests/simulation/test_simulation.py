"""Simulated clusters keep their promises; the same seed does the same again; a broken broker is noticed."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.share import share
from tests.simulation.breaks import BREAKS
from tests.simulation.world import many, simulate

ROOT = Path(__file__).parents[2]
IN_CI = "acknowledged-before-replicated"
"""It is found with the first seed; the others are looked for by night."""
OTHERS = sorted(set(BREAKS) - {IN_CI})


def run(*options: str) -> tuple[int, str]:
    """Run the command; returns its exit code and what it printed."""
    command = [sys.executable, "-m", "tests.simulation", *options]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=2400)
    return found.returncode, found.stdout + found.stderr


def seeds_of(count: int) -> range:
    """Those of the first ``count`` seeds that this run takes; see tests/crash/share.py."""
    turn, of = share()
    return range(count * turn // of, count * (turn + 1) // of)


def test_a_few_seeds() -> None:
    with many():
        outcomes = [simulate(seed) for seed in range(4)]
    assert sum(outcome.ledger.acknowledged for outcome in outcomes) > 20
    assert sum(len(outcome.ledger.seen) for outcome in outcomes) > 20


def test_masters_change_when_controllers_elect_them() -> None:
    with many():
        outcomes = [simulate(seed) for seed in (5, 7, 19)]
    for outcome in outcomes:
        assert outcome.scenario.controllers
        assert len(outcome.ledger.masters) > 1
        assert outcome.ledger.acknowledged > 5


def test_users_that_all_brokers_know_stay_and_deleted_ones_do_not_come_back() -> None:
    with many():
        outcomes = [simulate(seed) for seed in (4, 30)]
    for outcome in outcomes:
        assert outcome.scenario.users
        assert len(outcome.ledger.masters) > 1
        assert len(outcome.ledger.users.known_deleted) > 10
        assert len(outcome.ledger.users.known_made) > 5


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_500_seeds_keep_every_promise() -> None:
    seeds = seeds_of(500)
    code, printed = run("--seeds", f"{seeds[0]}-{seeds[-1]}")
    assert code == 0, printed


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_same_seed_does_the_same_again() -> None:
    seeds = seeds_of(50)
    code, printed = run("--seeds", f"{seeds[0]}-{seeds[-1]}", "--twice")
    assert code == 0, printed
    assert sum(map(int, re.findall(r"(\d+) simulations", printed))) == 2 * len(seeds)


def test_another_process_does_the_same() -> None:
    """What happens depends on no process id, and on nothing that an earlier simulation leaves behind."""
    text = (
        "import sys\n"
        "from tests.simulation.world import many, simulate\n"
        "with many():\n"
        "    for seed in map(int, sys.argv[1:]):\n"
        "        digest = simulate(seed).trace.digest\n"
        "print(digest)\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", text, *seeds],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seeds in (("6",), ("1", "2", "6"))
    }
    assert len(found) == 1
    assert found.pop().strip()


@pytest.mark.slow
def test_every_kind_of_fault_happens() -> None:
    kinds = {
        "is killed": "kill",
        "loses its power": "power",
        "shuts down": "stop",
        "is paused": "pause",
        "cut ": "cut",
        " and back": "both directions",
        "is reset": "reset",
        "ms off": "clock",
        "is isolated": "isolation",
        "is refused to": "refusal",
    }
    happened: Counter[str] = Counter()
    acknowledged = refused_or_unknown = 0
    with many():
        for seed in range(60):
            outcome = simulate(seed, keeps=True)
            happened.update(kind for line in outcome.trace.lines for text, kind in kinds.items() if text in line)
            acknowledged += outcome.ledger.acknowledged
            refused_or_unknown += outcome.ledger.refused + outcome.ledger.unknown
    assert set(happened) == set(kinds.values())
    assert acknowledged > 500
    assert refused_or_unknown > 20


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("broken", [IN_CI, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_a_broken_broker_is_noticed_and_its_seed_shows_it_again(broken: str) -> None:
    code, printed = run("--seeds", "0-499", "--first", "--break", broken)
    assert code == 1, printed
    failures = re.findall(r"^seed (\d+) FAILED: (.*)$", printed, re.MULTILINE)
    seed, why = failures[0]
    code, printed = run("--seeds", seed, "--break", broken, "--workers", "1")
    assert code == 1
    assert f"seed {seed} FAILED: {why}" in printed
