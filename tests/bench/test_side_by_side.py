"""The comparison with Apache's broker: what its figures are made of, and that the page shows them as they are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import bench.__main__ as page
from bench import quiet, side_by_side
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
    """Stands for a process; its port is what the load is told."""

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
        assert (arguments, seconds) == (side_by_side.ROWS["query8"][1], 2)
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
    """A clock that only sleeping moves."""

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
