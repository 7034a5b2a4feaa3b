"""Power cuts of a whole broker; ``make crash`` runs 200 rounds, ``make test`` a few."""

import sys

import pytest

from tests.crash.broker_rounds import Rounds, rounds
from tests.crash.enumeration import in_processes

ROUNDS = 200
PARTS = 8


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_broker_keeps_what_it_has_acknowledged(capsys: pytest.CaptureFixture[str]) -> None:
    each = ROUNDS // PARTS
    found = list(in_processes(rounds, [(1 + each * part, each) for part in range(PARTS)]))
    whole = Rounds(*(sum(column) for column in zip(*found, strict=True)))
    with capsys.disabled():
        sys.stdout.write(f"\n{whole}, seeds 1 to {ROUNDS}\n")
    assert whole.rounds == ROUNDS
    assert whole.acknowledged > 10 * ROUNDS


def test_a_few_rounds() -> None:
    found = rounds(1001, 3)
    assert found.rounds == 3
    assert found.acknowledged > 10
