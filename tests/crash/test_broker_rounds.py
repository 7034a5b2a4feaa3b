"""Power cuts of a whole broker; ``make crash`` runs 200 rounds, CI a share of them, ``make test`` a few."""

import sys

import pytest

from tests.crash.broker_rounds import Rounds, rounds
from tests.crash.enumeration import in_processes
from tests.crash.share import share

ROUNDS = 200
PARTS = 8


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_broker_keeps_what_it_has_acknowledged(capsys: pytest.CaptureFixture[str]) -> None:
    each = ROUNDS // PARTS
    parts = share().parts(PARTS)
    found = list(in_processes(rounds, [(1 + each * part, each) for part in parts]))
    whole = Rounds(*(sum(column) for column in zip(*found, strict=True)))
    with capsys.disabled():
        sys.stdout.write(f"\n{whole}\n")
    assert whole.rounds == each * len(parts)
    assert whole.acknowledged > 10 * whole.rounds


def test_a_few_rounds() -> None:
    found = rounds(1001, 3)
    assert found.rounds == 3
    assert found.acknowledged > 10
