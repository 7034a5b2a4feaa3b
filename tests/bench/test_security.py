"""The benchmark of TLS and access control: which brokers it starts, how ratios are computed, and that limits count."""

import json
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import sdk_load, security, side_by_side
from bench.security import FLOORS, KINDS, LOADS, PAIRS, missed, ratio
from bench.security_report import NAMES
from bench.security_report import security as section
from tests.bench.test_limits import exit_code
from tests.interop.harness import probe
from tests.tls_certificates import Certificates


def figures(rate: float, **more: Any) -> dict[str, Any]:
    return {"msg_s": rate, "p99_ms": 1.25, "failed": 0, "remark": "", **more}


def numbers(**ratios: float) -> dict[str, Any]:
    """Numbers that keep all limits, except for the given ratios, named ``row_one_other`` without hyphens."""
    rows: dict[str, Any] = {row: {name: figures(1234.0) for name in KINDS} | {"raw": {}} for row in LOADS}
    found: dict[str, dict[str, float]] = {}
    for row in LOADS:
        for one, other in PAIRS:
            name = f"{row}_{one}_{other}".replace("-", "")
            found.setdefault(row, {})[f"{one} / {other}"] = ratios.pop(name, FLOORS.get((row, one, other), 0.01))
    assert not ratios
    memory = {"before_mib": 30.0, "idle_mib": 40.0, "after_mib": 39.0, "kib_each": 10.24, "connections": 1000}
    sdk = {"unsigned": {"msg_s": 2000.0, "cpu_us": 10.0}, "signed": {"msg_s": 500.0, "cpu_us": 12.5}}
    return {
        "rounds": 3,
        "seconds": 6,
        "rows": rows,
        "ratios": found,
        "connections": {name: figures(777.0) for name in security.CONNECTED} | {"raw": {}},
        "memory": {"tls": memory},
        "sdk": {"rows": {"send64": sdk}},
    }


def test_each_floor_is_of_a_pair_and_of_a_row() -> None:
    assert {(one, other) for _, one, other in FLOORS} <= set(PAIRS)
    assert {row for row, _, _ in FLOORS} <= set(LOADS) <= side_by_side.ROWS.keys()
    assert {name for pair in PAIRS for name in pair} == KINDS.keys() == NAMES.keys()
    assert set(security.CONNECTED) <= KINDS.keys()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, ""),
        ({"send64_acl_plain": 0.69}, "send64: acl / plain is 0.69, at least 0.7 is wanted"),
        ({"pipelined_acl_plain": 0.69}, "pipelined: acl / plain"),
        ({"pipelined_pythonacl_pythonplain": 0.39}, "pipelined: python-acl / python-plain"),
        ({"send64_tls_plain": 0.59}, "send64: tls / plain"),
        ({"send64_acl_apacheacl": 1.79}, "send64: acl / apache-acl"),
        ({"pull1_acl_apacheacl": 1.79}, "pull1: acl / apache-acl"),
        ({"send64_tls_apachetls": 1.49}, "send64: tls / apache-tls"),
        ({"pull1_tls_apachetls": 1.49}, "pull1: tls / apache-tls"),
    ],
)
def test_a_limit_that_is_missed_fails(
    changed: dict[str, float], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = numbers(**changed)
    monkeypatch.setattr(security, "NATIVE", SimpleNamespace(is_on=True))
    monkeypatch.setattr(security, "measure", lambda *_: found)
    stored = tmp_path / "security.json"
    assert exit_code(security.main, monkeypatch, "--json", str(stored)) == int(bool(text))
    assert json.loads(stored.read_text()) == found
    assert [line.startswith(text) for line in missed(found)] == [True] * int(bool(text))
    page = "\n".join(section(found))
    assert f"- **{text}" in page if text else "**" not in page


@pytest.mark.parametrize("part", ["pull1", "connections"])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (figures(1234.0, failed=2, remark="code 16 no"), "2 failures, 1,234 a second code 16 no"),
        (figures(0.0), "0 failures, 0 a second"),  # a pull that is refused is no failure of the generator
    ],
)
def test_a_load_that_fails_or_finds_nothing_counts(part: str, bad: dict[str, Any], says: str) -> None:
    found = numbers()
    (found["rows"][part] if part == "pull1" else found["connections"])["tls"] = bad
    (line,) = missed(found)
    assert line.startswith(f"{part}, tls: {says}")


def test_numbers_of_some_parts_are_judged_too() -> None:
    some = numbers()
    assert missed({"rounds": 1, "seconds": 1, "memory": some["memory"]}) == []
    assert not any("messages/s" in line for line in section({"rounds": 1, "seconds": 1, "memory": some["memory"]}))


def test_the_section_has_all_figures() -> None:
    found = numbers(send64_acl_plain=0.5)
    found["rows"]["send64"]["tls-acl"] = figures(98_765.0)
    page = section(found)
    assert "| messages/s | pull1 | send64 | pipelined | mixed64 |" in page
    assert "| ours, TLS and access control | 1,234 | 98,765 | 1,234 | 1,234 |" in page
    assert "| ours, access control | / ours | 0.01 | **0.50** (floor 0.7) | 0.70 (floor 0.7) | 0.01 |" in page
    assert "| Apache's, TLS | 777 | 1.25 |" in page
    assert (
        "- ours, TLS: anonymous memory 30.0 MiB, 40.0 with 1,000 idle connections (10.2 KiB each),"
        " 39.0 after they were closed" in page
    )
    assert "| send64 | signed | 500 | 0.25 | 12.5 |" in page


def test_a_ratio_is_the_median_of_those_of_single_rounds() -> None:
    raw = {"acl": [{"msg_s": rate} for rate in (50, 90, 400)], "plain": [{"msg_s": rate} for rate in (100, 100, 1000)]}
    assert ratio({"raw": raw}, "acl", "plain") == 0.5
    medians = [statistics.median(run["msg_s"] for run in raw[name]) for name in ("acl", "plain")]
    assert medians[0] / medians[1] == 0.9


class Started:
    """Replaces broker processes, and records how they were started."""

    def __init__(self) -> None:
        self.commands: dict[str, list[str]] = {}
        self.settings: dict[str, dict[str, str]] = {}
        self.alive: list[str] = []
        self.killed: list[str] = []

    @contextmanager
    def process(self, name: str, command: list[str], _root: Path, **settings: str) -> Iterator[SimpleNamespace]:
        self.commands[name], self.settings[name] = command, settings
        self.alive.append(name)
        yield SimpleNamespace(name=name, port=4000 + len(self.alive), kill=lambda: self.killed.append(name))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(security, "BrokerProcess", found.process)
    monkeypatch.setattr(security, "apache_command", lambda _home, *options: ["java", *options])
    return found


@pytest.mark.parametrize("name", list(KINDS))
def test_a_broker_has_what_its_kind_says(
    name: str, started: Started, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(security, "create_user", lambda address, user, _secret: asked.append((address, user)))
    monkeypatch.setattr(security, "allow", lambda address, user, resource, _actions: asked.append((user, resource)))
    monkeypatch.setattr(probe, "ACCESS", {})
    with security.running(name, tmp_path, certificates, brokerName="b") as broker:
        address = f"127.0.0.1:{broker.port}"
        assert not started.killed
    assert started.killed == [name]  # Apache's broker would take 20 s
    command, settings = started.commands[name], started.settings[name]
    assert settings["brokerName"] == "b"
    assert (settings.get("authenticationEnabled"), settings.get("authorizationEnabled")) == (
        ("true", "true") if kind.acl else (None, None)
    )
    users = [(address, "load"), *(("load", resource) for resource in security.POLICIES)]
    assert asked == (users if kind.acl else [])
    where = settings if kind.is_ours else dict(option[2:].split("=", 1) for option in command[1:])
    assert where.get("tls.server.certPath") == (str(certificates.server.cert) if kind.tls else None)
    assert bool(probe.ACCESS[address].context) == kind.tls
    if kind.is_ours:
        assert command[:2] == ["env", f"TRIMQ_NATIVE={'on' if kind.native else 'off'}"]
    arguments = security.options(name, certificates)
    assert (f"-tls-ca {certificates.ca}" in arguments) == kind.tls
    assert ("-access-key load -secret-key" in arguments) == kind.acl


def test_brokers_take_turns_after_a_warm_up_of_each(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"plain": iter((100, 300, 200)), "tls": iter((50, 60, 10))}
    ran: list[tuple[str, str]] = []

    @contextmanager
    def running(name: str, _root: Path, _certificates: Certificates) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(name=name, port=name, paused=nullcontext)

    def load(_tool: Path, name: str, arguments: str, seconds: int) -> dict[str, Any]:
        ran.append((name, arguments))
        if "-n 60000" in arguments:
            return {}
        assert seconds == 2
        rate = next(rates[name])
        found: dict[str, Any] = dict.fromkeys(side_by_side.FIGURES, 0)
        return found | {"msg_s": rate, "failed": int(rate == 60), "remark": "why" if rate == 60 else ""}

    monkeypatch.setattr(security, "settle", lambda: None)
    monkeypatch.setattr(security, "running", running)
    monkeypatch.setattr(security, "load", load)
    monkeypatch.setattr(os, "sync", lambda: None)
    found = security.measured(tmp_path, certificates, ["plain", "tls"], "-mode send", 3, 2)
    assert [name for name, _ in ran] == ["plain", "tls"] * 4
    assert all(("-tls-ca" in arguments) == (name == "tls") for name, arguments in ran)
    assert (found["plain"]["msg_s"], found["tls"]["msg_s"]) == (200, 50)
    assert (found["tls"]["failed"], found["tls"]["remark"], found["plain"]["failed"]) == (1, "why", 0)
    assert [run["msg_s"] for run in found["raw"]["tls"]] == [50, 60, 10]


def test_the_sdk_sends_unsigned_signed_and_with_stamps_in_turns(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = {"plain": 1, "acl": 2}
    paused: set[str] = set()
    seen: list[tuple[str, int, set[str], bool, bool]] = []

    @contextmanager
    def running(name: str, _root: Path, _certificates: Certificates, **settings: Any) -> Iterator[SimpleNamespace]:
        ports[name] = settings["embeddedNamesrvPort"]

        @contextmanager
        def pause() -> Iterator[None]:
            paused.add(name)
            yield
            paused.remove(name)

        yield SimpleNamespace(name=name, port=name, paused=pause)

    def load(namesrv: str, topic: str, mode: str, _seconds: float, *more: str) -> dict[str, float]:
        assert topic == "Sends"
        options = sdk_load.parser().parse_args([namesrv, topic, mode, "1", *more])
        credentials = sdk_load.options(options).credentials
        stamps = credentials is not None and credentials.replay_protection
        seen.append((mode, int(namesrv.rpartition(":")[2]), set(paused), credentials is not None, stamps))
        return {"msg_s": float(len(seen)), "cpu_us": 1.0}

    created = []
    monkeypatch.setattr(security, "running", running)
    monkeypatch.setattr("bench.sdk.our_figures", load)
    monkeypatch.setattr(probe, "create_topic", lambda address, _topic, _queues: created.append(address))
    monkeypatch.setattr(os, "sync", lambda: None)
    found = security.sends(certificates, 3, 1)
    turn = [
        (mode, ports[name], {other}, signs, stamps)
        for mode in ("send", "linger")
        for name, other, signs, stamps in (
            ("plain", "acl", False, False),
            ("acl", "plain", True, False),
            ("acl", "plain", True, True),
        )
    ]
    assert seen == turn * 3
    assert created == ["127.0.0.1:plain", "127.0.0.1:acl"]
    assert found["rows"]["linger64"]["signed"]["msg_s"] == 11  # the median of 5, 11, 17
    assert found["rows"]["send64"]["signed, with stamps"]["msg_s"] == 9


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("name", ["plain", "tls"])
def test_the_memory_of_idle_connections(name: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "IDLE_SECONDS", 0)
    found = security.memory(name, certificates, 400)
    assert found["connections"] == 400
    assert found["kib_each"] == pytest.approx((found["idle_mib"] - found["before_mib"]) * 1024 / 400, abs=0.1)
    assert found["idle_mib"] > 10
    assert (found["kib_each"] > 5) == (name == "tls")


def test_without_the_native_extension_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "NATIVE", SimpleNamespace(is_on=False, status="another version"))
    monkeypatch.setattr(security, "measure", lambda *_: {"rounds": 1, "seconds": 1})
    stored = tmp_path / "security.json"
    assert exit_code(security.main, monkeypatch, "--json", str(stored)) == 1
    assert not stored.exists()


def test_unknown_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(security.main, monkeypatch, "--parts", "loads,nothing") == 2
    assert exit_code(security.main, monkeypatch, "--rows", "batch") == 2
