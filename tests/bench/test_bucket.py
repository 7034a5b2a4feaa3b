"""The benchmark of a bucket, with small numbers: what it counts is there, and the report shows it."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import bench.__main__ as page
from bench import bucket
from bench.backlog import Growth, until
from bench.bucket import MANY_QUEUES, SENDS, Figures, in_turns, measure
from bench.bucket_report import bucket as report_of
from bench.bucket_stores import count_kinds, is_joinable
from bench.timers import Client
from tests.interop.harness import partners
from tests.ports import free_port
from trimq.broker.store.tiered.bucket.joiner import JOIN_BYTES

MIB = 4


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    partners.tool("go")
    monkeypatch.setattr("bench.bucket.settle", lambda *_: None)  # other tests keep the disk busy
    return tmp_path


def measured(root: Path, part: str, **more: Any) -> dict[str, Any]:
    return measure(root, [part], **{"mib": MIB, "seconds": 1, "rounds": 1, "restore_gib": 0.0, **more})


@pytest.mark.partners
@pytest.mark.nightly
@pytest.mark.timeout(240, func_only=True)
def test_uploads(root: Path) -> None:
    found = measured(root, "uploads")
    for part in ("upload8", f"upload{MANY_QUEUES}"):
        posix, ours = found[part]["posix"], found[part]["bucket"]
        assert posix["messages"] >= MIB * 800
        assert ours["messages"] >= MIB * 800
        assert ours["mib"] >= 0.9 * MIB
        assert min(posix["mib_s"], ours["mib_s"], ours["msg_s"]) > 0
        assert ours["ratios"] == [ours["ratio"]]
        assert posix["server_cpu_s"] == 0 < ours["broker_cpu_s"]
        assert min(posix["anonymous_mib"], ours["anonymous_mib"]) > 10
    assert "| upload8 | MiB/s uploaded, 8 queues |" in "\n".join(report_of(found))


@pytest.mark.partners
@pytest.mark.nightly
@pytest.mark.timeout(240, func_only=True)
def test_reads(root: Path) -> None:
    found = measured(root, "reads")
    for kind in ("posix", "bucket"):
        before = found["catchup1"][kind]["messages"]
        assert before == found["catchup8"][kind]["messages"] >= MIB * 800
        assert found["joined1"][kind]["messages"] == found["joined8"][kind]["messages"] > 2 * before
        assert found["catchup8"][kind]["anonymous_mib"] > 10
        start, cold = found["start"][kind], found["cold"][kind]
        assert start["s"] >= start["s_until_port"] > 0
        assert min(start["ms_first"], cold["ms_first"], cold["ms_median"]) > 0
    assert found["joined_share"] == 0  # so little is not joined
    assert "After joins 0% of the bytes were in joined objects." in report_of(found)


@pytest.mark.partners
@pytest.mark.nightly
@pytest.mark.timeout(240, func_only=True)
def test_sends(root: Path) -> None:
    found = measured(root, "sends")
    for part in SENDS:
        assert found[part]["none"]["msg_s"] > 0
        for kind in ("posix", "bucket"):
            assert found[part][kind]["msg_s"] > 0
            assert found[part][kind]["ratio"] > 0
            assert found[part][kind]["uploaded_msg_s"] >= 0
    assert len([line for line in report_of(found) if "POSIX files |" in line]) == len(SENDS)


@pytest.mark.partners
@pytest.mark.nightly
@pytest.mark.timeout(240, func_only=True)
def test_a_restore(root: Path) -> None:
    found = measured(root, "restore", restore_gib=MIB / 1024)["restore"]
    assert found["messages"] >= MIB * 800
    assert found["objects"]["uploaded"] >= 1
    for how in ("start", "mqstore"):
        assert 0 < found[how]["s_first"] <= found[how]["s_last"]
        assert found[how]["get"] >= 1
        assert found[how]["list"] >= 1
    assert found["start"]["put"] >= 1  # it takes the bucket
    assert found["mqstore"]["put"] == 0
    assert found["mqstore"]["s_command"] > 0


# -- how it computes


def test_contenders_take_turns_and_are_divided_by_the_first() -> None:
    order: list[str] = []
    rates: dict[str, list[float]] = {"posix": [10, 20, 40], "bucket": [5, 40, 30]}

    def run(name: str) -> Figures:
        order.append(name)
        return {"rate": rates[name].pop(0)}

    found = in_turns(3, {"posix": lambda: run("posix"), "bucket": lambda: run("bucket")}, "rate")
    assert order == ["posix", "bucket", "bucket", "posix", "posix", "bucket"]
    assert found == {"posix": {"rate": 20}, "bucket": {"rate": 30, "ratio": 0.75, "ratios": [0.5, 2.0, 0.75]}}


def listed(count: int, *, generation: int = 0) -> list[dict[str, Any]]:
    size = JOIN_BYTES // 64
    return [
        {"begin": at * size, "end": (at + 1) * size, "generation": generation, "epoch": 1, "length": size}
        for at in range(count)
    ]


def test_what_a_broker_would_still_join() -> None:
    all_saved = JOIN_BYTES * 2
    assert not is_joinable([], 0)
    assert not is_joinable(listed(63), all_saved)
    assert is_joinable(listed(64), all_saved)
    assert not is_joinable(listed(64), 0)


def test_requests_by_kind() -> None:
    found = count_kinds(["GetObject", "ListObjectsV2", "PutObject", "UploadPart", "GetObject", "DeleteObjects"])
    assert found == {"get": 2, "list": 1, "put": 2, "other": 1}


def test_growth_from_a_known_begin() -> None:
    with Growth(lambda: 500, 0.001, 0) as growth:
        until(lambda: growth.size == 500, "a sample")
    assert growth.size == 500
    assert growth.ended > growth.began
    assert growth.rate() > 0


@pytest.mark.timeout(20)
def test_a_connection_that_ends_does_not_wait_forever() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:

        def close_the_first() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.close()

        closing = threading.Thread(target=close_the_first)
        closing.start()
        client = Client(port)
        with pytest.raises(ConnectionError, match="the broker has closed"):
            client.ask(28)
        closing.join()
        client.close()


def both(**more: float) -> dict[str, Any]:
    return {"posix": {**more}, "bucket": {name: 2 * value for name, value in more.items()}}


def figures() -> dict[str, Any]:
    upload = both(mib_s=100.5, msg_s=80_000, s_since_start=4.0, broker_cpu_s=2.0, server_cpu_s=0.0, anonymous_mib=50.0)
    catching = both(msg_s=100_000, broker_cpu_s=1.0, server_cpu_s=0.0, anonymous_mib=60.0)
    sends = {
        "none": {"msg_s": 90_000},
        "posix": {"msg_s": 81_000, "uploaded_msg_s": 50_000, "ratio": 0.9},
        "bucket": {"msg_s": 72_000, "uploaded_msg_s": 49_000, "ratio": 0.8},
    }
    restored = {"s_until_port": 0.5, "s_first": 0.6, "s_last": 0.7, "get": 12.0, "list": 2.0, "put": 3.0}
    return {
        "rounds": 3,
        "broker_cpu": 0,
        "server_cpu": 1,
        "joined_share": 0.9,
        "upload8": upload,
        "upload1000": upload,
        **dict.fromkeys(("catchup1", "catchup8", "joined1", "joined8"), catching),
        "start": both(s=0.7, s_until_port=0.6),
        "cold": both(ms_first=10.0, ms_median=5.0),
        **dict.fromkeys(SENDS, sends),
        "restore": {
            "gib": 10.0,
            "messages": 8_000_000,
            "objects": {"uploaded": 5, "joined": 70},
            "start": restored,
            "mqstore": {"s_command": 0.9, **restored},
        },
    }


def test_the_report_has_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    (tmp_path / "bucket.json").write_text(json.dumps({"machine": {"commit": "abc"}, "numbers": figures()}))
    lines = page.report().splitlines()
    for line in (
        "Medians of 3 rounds, in turns. The broker on processor 0, versitygw on 1, the load generator on all.",
        "After joins 90% of the bytes were in joined objects.",
        "| upload8 | MiB/s uploaded, 8 queues | 100.5 | 201.0 | 2.00 |",
        "| upload8 | s of processor time, object server | 0.0 | 0.0 |  |",
        "| joined1 | messages/s read by 1 consumer, after joins | 100,000 | 200,000 | 2.00 |",
        "| mixed messages, with the upload limit | bucket | 90,000 | 72,000 | 49,000 | 0.80 |",
        "| start; requests until there are no more | 0.50 | 0.60 | 0.70 | 12 | 2 | 3 |",
        "| after `mqstore tiered restore`, 0.90 s; its requests |  | 0.60 | 0.70 | 12 | 2 | 3 |",
    ):
        assert line in lines
    assert any(
        line.endswith("8,000,000 messages, 70 joined and 5 uploaded objects) starts on an empty disk:")
        for line in lines
    )


def test_the_command_stores_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(root: Path, wanted: list[str], **more: Any) -> dict[str, Any]:
        asked.update(more, wanted=wanted, root=root)
        return figures()

    monkeypatch.setattr(bucket, "measure", measure)
    stored = tmp_path / "bucket.json"
    arguments = [
        "bench",
        "--mib",
        "8",
        "--rounds",
        "2",
        "--restore-gib",
        "0.5",
        "--parts",
        "sends",
        "--json",
        str(stored),
    ]
    monkeypatch.setattr("sys.argv", arguments)
    bucket.main()
    assert json.loads(stored.read_text()) == figures()
    assert not asked.pop("root").exists()
    assert asked == {"wanted": ["sends"], "mib": 8, "seconds": 8, "rounds": 2, "restore_gib": 0.5}
    monkeypatch.setattr("sys.argv", ["bench", "--parts", "unknown"])
    with pytest.raises(SystemExit):
        bucket.main()
