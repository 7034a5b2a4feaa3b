"""The benchmark of tiered storage, with small numbers and our broker only: what it counts is there."""

from pathlib import Path

import pytest

from bench.processes import our_command
from bench.tier import PARTS, SENDS, measure
from tests.interop.harness import partners

pytestmark = [pytest.mark.partners, pytest.mark.nightly, pytest.mark.timeout(240, func_only=True)]


def test_it_measures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partners.tool("go")
    monkeypatch.setattr("bench.tier.settle", lambda *_: None)  # other tests keep the disk busy
    found = {
        part: figures["ours"]
        for part, figures in measure({"ours": our_command()}, tmp_path, PARTS, mib=16, seconds=1, rounds=1).items()
    }
    messages = found["upload"]["messages"]
    assert messages >= 12_000
    assert found["upload"]["mib"] >= 12
    assert found["upload"]["msg_s"] > 0
    assert found["catchup1"]["messages"] == found["catchup8"]["messages"] > messages
    assert found["cold"]["ms_median"] > 0
    for part in SENDS:
        assert found[part]["msg_s_with"] > 0
        assert found[part]["ratios"] == [found[part]["ratio"]]
