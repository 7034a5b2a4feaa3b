"""A power cut at every disk call of uploads, rolls, compaction, restart and expiry of the tier; see tiered.py.

The full enumeration is marked slow and runs in ``make crash``, a share of it in CI; ``make test`` checks a sample.
"""

import sys

import pytest

from tests.crash.enumeration import in_processes
from tests.crash.share import share
from tests.crash.tiered import TierTally, check_part, record

PARTS = 8


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_cut_at_any_call_of_the_tier_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    whole = TierTally()
    for tally in in_processes(check_part, [(part, PARTS) for part in share().parts(PARTS)]):
        whole.add(tally)
    with capsys.disabled():
        sys.stdout.write(f"\n{whole}\n")
    assert whole.states > share().least(3000)
    assert whole.calls > 800


def test_a_sample_of_cuts_of_the_tier() -> None:
    tally = check_part(3, PARTS, 29)
    assert tally.states > 10


def test_the_script_of_the_tier_does_what_it_is_for() -> None:
    """It rolls and deletes segments of each kind, uploads an index file, and deletes log files."""
    calls = [image.call for image in record().values()]
    for kind, rolls in (("COMMIT_LOG", 5), ("CONSUME_QUEUE", 3), ("INDEX", 1)):
        created = {call for call in calls if call.startswith("create ") and f"/{kind}/" in call}
        assert len(created) >= rolls, kind
    for kind in ("COMMIT_LOG", "CONSUME_QUEUE"):
        assert any(call.startswith("delete ") and f"/{kind}/" in call for call in calls)
    assert any(call.startswith("delete /store/commitlog/") for call in calls)
    assert any("tieredStoreMetadata.json" in call for call in calls)
