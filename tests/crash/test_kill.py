"""The real process killed under load: a few seeded kills; ``python -m tests.crash.kill`` runs fifty."""

from pathlib import Path

import pytest

from tests.crash.kill import run


@pytest.mark.alone
@pytest.mark.timeout(180)
async def test_a_kill_takes_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    report = await run(tmp_path, kills=3, seed=1)
    assert not report.faults, report
    assert report.lost == 0, report
    assert report.kills == 3
    assert report.stored >= report.acknowledged > 200
    assert report.queries > 50


@pytest.mark.alone
@pytest.mark.timeout(180)
async def test_the_transient_store_pool_loses_only_what_was_not_committed(tmp_path: Path) -> None:
    """A kill takes the last acknowledged messages, none older than the commit intervals and none already read."""
    report = await run(tmp_path, kills=3, seed=2, pool=True)
    assert not report.faults, report
    assert report.stored > 200
    assert report.lost > 0
    assert report.stored + report.lost >= report.acknowledged
    # Two commit intervals of half a second, and the delays of a busy machine.
    assert 0 < report.lost_seconds < 5, report
