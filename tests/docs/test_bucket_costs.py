"""docs/bucket-costs.md has the tables that the code makes, and they keep within the budgets."""

from collections.abc import Iterator

import pytest

from tests.docs.commands import ROOT
from tools import bucket_costs
from tools.bucket_costs import GIB, MIB, Load, Prices, for_a_gibibyte, for_a_month, for_an_hour, puts, stored
from trimq.broker.store.tiered.bucket import object_contents
from trimq.broker.tiered_config import TieredStoreConfig

PAGE = (ROOT / "docs" / "bucket-costs.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())


@pytest.mark.parametrize("table", [for_a_gibibyte(), for_an_hour(), for_a_month(Prices())])
def test_the_tables_are_those_of_the_code(table: object) -> None:
    assert isinstance(table, Iterator)
    assert "\n".join(table) in PAGE


def test_the_text_has_the_figures_of_the_code() -> None:
    prices, config = Prices(), TieredStoreConfig()
    assert f"${prices.storage} for a GiB" in WORDS
    assert f"${prices.puts} for 1,000 PUTs" in WORDS
    assert f"${prices.gets} for 1,000 GETs" in WORDS
    assert f"for each {object_contents.OBJECT_BYTES // MIB} MiB of log" in WORDS
    assert f"`tieredStoreGroupCommitTimeout` ({config.tiered_store_group_commit_timeout // 1000} s)" in WORDS


@pytest.mark.parametrize("queues", [1, 8, 31, 32, 33, 1000])
def test_budgets(queues: int) -> None:
    assert puts(Load(MIB, queues=queues)) * GIB / (MIB * 3600) <= 300
    assert puts(Load(1024 / 30, queues=queues)) <= 130


def test_what_is_stored() -> None:
    load = Load(1024, size=1000, keys=0, days=10)
    assert stored(load) == pytest.approx((10 * 86_400 + 3600) * 1024 * 1.02)


def test_a_load_and_prices_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bucket_costs", "--rate", "1024", "--storage", "0.046"])
    bucket_costs.main()
    _, _, line = capsys.readouterr().out.splitlines()
    (whole,) = (row for row in for_a_month(Prices()) if row.startswith("| 1 MiB |"))
    storage = float(whole.split("|")[3].strip(" $").replace(",", ""))
    assert line.startswith("| 1024 KiB |")
    assert float(line.split("|")[3].strip(" $").replace(",", "")) == pytest.approx(2 * storage, abs=0.02)
    monkeypatch.setattr("sys.argv", ["bucket_costs"])
    bucket_costs.main()
    assert all(line in PAGE for line in capsys.readouterr().out.splitlines())
