"""The comparison with Apache's broker: how its figures are computed, and that the page shows the measured ones."""

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import bench.__main__ as page
from bench import mixed, quiet, side_by_side
from bench.plots import Plots
from bench.processes import BrokerProcess


def test_the_page_is_what_the_raw_numbers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plots = page.HERE / "plots"
    monkeypatch.setattr(page, "PLOTS", Plots(tmp_path / "plots"))
    assert page.report() == (page.HERE / "REPORT.md").read_text(encoding="utf-8")
    for picture in (tmp_path / "plots").iterdir():
        assert picture.read_text(encoding="utf-8") == (plots / picture.name).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)


class Broker:
    """Replaces a broker process; the load is given its port."""

    def __init__(self, name: str, port: int, paused: set[str]) -> None:
        self.name = name
        self.port = port
        self._paused = paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused.add(self.name)
        yield
        self._paused.remove(self.name)


@pytest.mark.parametrize("together", [False, True])
def test_ratios_are_those_of_the_medians_and_the_others_pause(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: set[str] = set()
    rates = {1: iter((100, 300, 250)), 2: iter((900, 400, 500))}
    seen = []

    def load(_tool: Path, port: int, arguments: str, seconds: int) -> dict[str, Any]:
        assert (arguments, seconds) == (side_by_side.ROWS["query8"].load, 2)
        seen.append((port, set(paused)))
        figures: dict[str, Any] = dict.fromkeys(side_by_side.FIGURES, 0)
        return figures | {"msg_s": next(rates[port]), "p99_ms": float(port)}

    monkeypatch.setattr(side_by_side, "load", load)
    brokers = cast("list[BrokerProcess]", [Broker("apache", 1, paused), Broker("ours", 2, paused)])
    found = side_by_side.compare(Path("tool"), brokers, "query8", 3, 2, together=together)
    assert (found["apache"]["msg_s"], found["ours"]["msg_s"]) == (250, 500)
    assert found["ratios"] == {"ours": {"throughput": 2.0, "p99": 2.0}}
    assert [run["msg_s"] for run in found["raw"]["ours"]] == [900, 400, 500]
    beside_apache, beside_ours = (set(), set()) if together else ({"ours"}, {"apache"})
    assert seen == [(1, beside_apache), (2, beside_ours)] * 3


class Time:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("busy_until", "ends", "says"), [(0.0, 1.0, False), (4.0, 5.0, False), (99.0, 10.0, True)])
def test_a_device_is_waited_for_until_it_has_rested_for_a_second(
    busy_until: float, ends: float, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Time()
    monkeypatch.setattr(quiet, "time", clock)
    monkeypatch.setattr(quiet, "_counters", lambda: [[str(min(clock.now, busy_until))]])
    quiet.settle(10.0)
    assert clock.now == pytest.approx(ends, abs=0.25)
    assert ("still busy" in capsys.readouterr().out) == says


def test_each_row_has_its_floors() -> None:
    assert page.FLOORS.keys() == side_by_side.ROWS.keys()
    assert (page.FLOORS["catchup1"][0], page.FLOORS["catchup8"][0], page.FLOORS["e2e"][1]) == (1.5, 1.2, 0.4)


def test_rows_that_write_what_they_read_have_stores_of_their_own() -> None:
    lists = side_by_side.shared_stores(list(side_by_side.ROWS))
    assert sorted(itertools.chain.from_iterable(lists)) == sorted(side_by_side.ROWS)
    for row, (flush, _, stores, writes) in side_by_side.ROWS.items():
        (own,) = [rows for rows in lists if row in rows]
        assert {side_by_side.ROWS[other].flush for other in own} == {flush}
        assert {side_by_side.ROWS[other].stores for other in own} == {stores}
        if writes:
            assert own == [row]
    assert side_by_side.shared_stores(["sync1", "mixed64", "send1"]) == [["mixed64"], ["send1"], ["sync1"]]


def test_a_backlog_is_written_to_one_broker_after_the_other_and_no_more_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused: set[str] = set()
    seen = []

    def load(_tool: Path, port: int, arguments: str, seconds: int) -> dict[str, Any]:
        assert seconds == 21
        seen.append((port, arguments, set(paused)))
        return {"messages": len(seen), "size": 1024}

    monkeypatch.setattr(side_by_side, "load", load)
    brokers = cast("list[BrokerProcess]", [Broker("apache", 1, paused), Broker("ours", 2, paused)])
    most = 8_000_000
    found = side_by_side.write_backlog(Path("tool"), brokers, "catchup1", 21, most)
    assert [[each["messages"] for each in loads] for loads in found.values()] == [[1, 2], [3, 4]]
    assert [(port, others) for port, _, others in seen] == [(1, {"ours"})] * 2 + [(2, {"apache"})] * 2
    small, large = (int(arguments.rpartition("-n ")[2]) for _, arguments, _ in seen[:2])
    assert "-size 65536" in seen[1][1]
    assert "-size" not in seen[0][1]
    assert small * 1024 + large * 65_536 <= most
    assert small * 1400 + large * 66_000 > most * 0.9


@pytest.mark.parametrize(("free", "most"), [(1 << 50, None), (4000, 1000)])
def test_a_backlog_leaves_half_of_the_free_disk(
    free: int, most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert side_by_side.most_bytes(tmp_path, 2) == (memory * 3 // 4 if most is None else most)


def test_new_rows_are_on_the_page_with_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PLOTS", Plots(tmp_path / "plots"))
    figures = {"msg_s": 2000.0, "p99_ms": 1.0, "failed": 0}
    one = {"apache": figures, "ours": figures, "ratios": {"ours": {"throughput": 1.0, "p99": 0.41}}}
    written = {"apache": [{"messages": 700, "size": 1024}, {"messages": 30, "size": 65536}]}
    rows = {"e2e": one, "catchup8": one | {"written": written}}
    numbers = {"rows": rows, "together": False, "processes": {}, "pythons": {}, "runs": []}
    text = page._side_by_side(numbers)
    assert "| e2e | 2,000 | 2,000 | 1.00 | 0.9 | 1.00 | 1.00 | 0.41 | 0.4 | later |" in text
    assert any(line.startswith("| catchup8 |") and line.endswith("| slower |") for line in text)
    assert "- catchup8, apache: backlog that was written before: 700 of 1,024 bytes and 30 of 65,536 bytes" in text
    assert {picture.name for picture in (tmp_path / "plots").iterdir()} == {"throughput.svg", "latency.svg"}


def test_a_load_gets_the_mixed_messages_and_its_failure_is_an_error(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "{\\"arguments\\": \\"$*\\"}"\ncase "$*" in *fail*) echo why >&2; exit 3;; esac\n')
    tool.chmod(0o755)
    found = side_by_side.load(tool, 7, side_by_side.ROWS["mixed64"].load, 3)
    assert found["arguments"].endswith(f"-conns 64 -mixed {tmp_path / mixed.FILE}")
    assert "-addr 127.0.0.1:7 -queues 4 -dur 3s" in found["arguments"]
    with pytest.raises(RuntimeError, match="why"):
        side_by_side.load(tool, 7, "-mode fail", 3)
