"""What TLS and access control (ACL 2.0) cost, beside Apache's broker with the same, in one run.

``python -m bench.security [--parts loads,connections,memory,sdk] [--rows pull1,send64] [--seconds 6] [--rounds 3]
[--json FILE]``. Loads are those of bench.side_by_side. All brokers of a row take turns, and those that are not measured
are paused (SIGSTOP); each row has new stores. TLS has version 1.3 and ECDSA P-256 certificates, which the client
verifies; the broker would serve plain connections too. With access control, a user with four policies signs all
requests. ``connections`` are new ones with a full handshake and a request each, ``memory`` is that of idle ones, and
``sdk`` shows what signatures and stamps cost our SDK.

Needs the native extension, Go, a JDK, Maven and openssl, and about 40 GB of disk. Exits with 1 if a limit is missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import frames, sdk
from bench.processes import BrokerProcess, free_port, load_tool, our_command
from bench.quiet import settle
from bench.side_by_side import FIGURES, ROWS, WARM_UP, apache_command, in_turns, load
from tests import tls_certificates
from tests.interop.harness import probe
from tests.interop.harness.security import allow, create_user, java_properties, secured
from tests.tls_certificates import Certificates
from trimq.protocol.codes import RequestCode
from trimq.protocol.native import NATIVE

PARTS: Final = ("loads", "connections", "memory", "sdk")


class Kind(NamedTuple):
    """A broker: ours or Apache's, with TLS, with access control; ours with the native extension or without."""

    is_ours: bool = True
    acl: bool = False
    tls: bool = False
    native: bool = True


KINDS: Final = {
    "apache": Kind(is_ours=False),
    "plain": Kind(),
    "apache-acl": Kind(is_ours=False, acl=True),
    "acl": Kind(acl=True),
    "apache-tls": Kind(is_ours=False, tls=True),
    "tls": Kind(tls=True),
    "tls-acl": Kind(tls=True, acl=True),
    "python-plain": Kind(native=False),
    "python-acl": Kind(acl=True, native=False),
}
"""The brokers of each row. Those that are compared follow each other."""
LOADS: Final = ("pull1", "send64", "pipelined", "mixed64")
"""Names of rows of bench.side_by_side."""
PAIRS: Final = (
    ("acl", "plain"),
    ("tls", "plain"),
    ("tls-acl", "plain"),
    ("python-acl", "python-plain"),
    ("apache-acl", "apache"),
    ("apache-tls", "apache"),
    ("plain", "apache"),
    ("acl", "apache-acl"),
    ("tls", "apache-tls"),
)
"""The brokers whose throughput is compared."""
FLOORS: Final = {
    ("send64", "acl", "plain"): 0.7,
    ("pipelined", "acl", "plain"): 0.7,
    ("send64", "python-acl", "python-plain"): 0.4,
    ("pipelined", "python-acl", "python-plain"): 0.4,
    ("send64", "tls", "plain"): 0.6,
    ("send64", "acl", "apache-acl"): 1.8,
    ("pull1", "acl", "apache-acl"): 1.8,
    ("send64", "tls", "apache-tls"): 1.5,
    ("pull1", "tls", "apache-tls"): 1.5,
}
"""The least throughput of a row with one broker, divided by that with another one."""

CONNECT: Final = "-mode connect -conns 16"
CONNECTED: Final = ("apache", "plain", "apache-tls", "tls")
IDLE: Final = 1000
"""Connections that are open and idle."""
IDLE_BEFORE: Final = 50
"""Connections that are opened and closed before, for what only the first ones need."""
IDLE_SECONDS: Final = 3

USER: Final = probe.Credentials("load", "canary-of-a-load")
POLICIES: Final = {
    "Topic:*": ("Pub", "Sub", "Get", "Create"),  # Create: the generator creates the topics of mixed messages
    "Group:*": ("Sub",),
    "Topic:Other": ("Sub",),
    "Topic:More*": ("Pub", "Sub"),
}

SIGNED: Final = ("--access-key", USER.access_key, "--secret-key", USER.secret_key)
SDK: Final = {
    "unsigned": ("plain", ()),
    "signed": ("acl", (*SIGNED, "--no-stamps")),
    "signed, with stamps": ("acl", SIGNED),
}
"""A broker, and options of bench.sdk_load."""
SDK_LOADS: Final = {"send64": "send", "linger64": "linger"}
"""Loads of bench.sdk_load, with 64 sends in flight."""


@contextmanager
def running(name: str, root: Path, certificates: Certificates, **properties: object) -> Iterator[BrokerProcess]:
    """Start a broker of KINDS; with access control, it has USER and its policies."""
    kind = KINDS[name]
    peer = "trimq" if kind.is_ours else "apache"
    security = secured(certificates if kind.tls else None, "permissive", access_control=kind.acl)
    keys = root / f"{name}-keys"
    keys.mkdir()
    settings = {**security.settings(peer), **security.broker_settings(peer, keys), **properties}
    if not kind.is_ours:
        command = apache_command(root / f"{name}-logs", *java_properties(security.tls))
    else:
        command = ["env", f"TRIMQ_NATIVE={'on' if kind.native else 'off'}", *our_command()]
    with BrokerProcess(name, command, root, **settings) as broker, ExitStack() as stack:
        stack.callback(broker.kill)
        address = f"127.0.0.1:{broker.port}"
        probe.ACCESS[address] = security.access
        if kind.acl:
            create_user(address, USER.access_key, USER.secret_key)
            for resource, actions in POLICIES.items():
                allow(address, USER.access_key, resource, actions)
        yield broker


def options(name: str, certificates: Certificates) -> str:
    """The arguments of the load generator for a broker of KINDS."""
    kind = KINDS[name]
    tls = f"-tls-ca {certificates.ca}" if kind.tls else ""
    return tls + (f" -access-key {USER.access_key} -secret-key {USER.secret_key}" if kind.acl else "")


def measured(
    tool: Path, certificates: Certificates, names: Sequence[str], arguments: str, rounds: int, seconds: int
) -> dict[str, Any]:
    """The medians of a load on each broker of ``names``, with the figures of each round as ``raw``."""
    settle()  # the stores of the row before have just been deleted
    with tempfile.TemporaryDirectory(prefix="trimq-security-") as directory, ExitStack() as stack:

        def measure(broker: BrokerProcess) -> dict[str, Any]:
            return load(tool, broker.port, f"{arguments} {options(broker.name, certificates)}", seconds)

        brokers = [stack.enter_context(running(name, Path(directory), certificates)) for name in names]
        for broker in brokers:  # messages for pulls; this warms up the JIT compiler too
            load(tool, broker.port, f"{WARM_UP} {options(broker.name, certificates)}", 60)
        raw = in_turns(brokers, rounds, measure)
    found = {name: _summary(runs) for name, runs in raw.items()}
    for name, figures in found.items():
        rate = f"{figures['msg_s']:9,.0f}/s p99 {figures['p99_ms']:8.2f} ms   failed {figures['failed']}"
        print(f"{arguments.partition(' -mixed')[0]:36s} {name:14s} {rate}", flush=True)
    return {**found, "raw": raw}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a broker's rounds, all their failures, and the first remark on one."""
    figures = {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES}
    remarks = [run["remark"] for run in runs if run["remark"]]
    return figures | {"failed": sum(run["failed"] for run in runs), "remark": remarks[0] if remarks else ""}


def ratio(row: dict[str, Any], one: str, other: str) -> float:
    """The throughput with one broker, divided by that with another one: the median of the ratios of single rounds."""
    pairs = zip(row["raw"][one], row["raw"][other], strict=True)
    ratios = [float(first["msg_s"] / max(1, second["msg_s"])) for first, second in pairs]
    return round(statistics.median(ratios), 3)


def memory(name: str, certificates: Certificates, count: int = IDLE) -> dict[str, float]:
    """The anonymous memory of a broker in MiB without connections and with idle ones, and after they were closed."""
    context = certificates.client_context() if KINDS[name].tls else None

    def opened(stack: ExitStack, number: int) -> None:
        access = probe.Access(context)
        for _ in range(number):
            connection = stack.enter_context(probe.connected(f"127.0.0.1:{broker.port}", 30.0, access))
            connection.sendall(request)
            if not connection.recv(4096):
                raise RuntimeError(f"{name} has closed a connection")

    request = frames.frame(RequestCode.GET_MAX_OFFSET, 1, '"topic":"TBW102","queueId":"0"')
    with (
        tempfile.TemporaryDirectory(prefix="trimq-security-") as directory,
        running(name, Path(directory), certificates) as broker,
    ):
        with ExitStack() as stack:
            opened(stack, IDLE_BEFORE)
        time.sleep(IDLE_SECONDS)
        before = broker.memory_mib()
        with ExitStack() as stack:
            opened(stack, count)
            time.sleep(IDLE_SECONDS)
            idle = broker.memory_mib()
        time.sleep(IDLE_SECONDS)
        after = broker.memory_mib()
    found = {"before_mib": before, "idle_mib": idle, "after_mib": after, "kib_each": (idle - before) * 1024 / count}
    print(f"{count} idle connections, {name}: {found['kib_each']:.1f} KiB each", flush=True)
    return {key: round(value, 2) for key, value in found.items()} | {"connections": count}


def sends(certificates: Certificates, rounds: int, seconds: int) -> dict[str, Any]:
    """Messages a second and CPU time of a message, of our SDK: medians, and the figures of all rounds as ``raw``."""
    raw: dict[str, dict[str, list[dict[str, float]]]] = {row: {how: [] for how in SDK} for row in SDK_LOADS}
    with tempfile.TemporaryDirectory(prefix="trimq-security-") as directory, ExitStack() as stack:
        brokers: dict[str, tuple[BrokerProcess, str]] = {}
        for name in ("plain", "acl"):
            port = free_port()
            settings: dict[str, object] = {"namesrvAddr": "", "embeddedNamesrvPort": port}
            broker = stack.enter_context(running(name, Path(directory), certificates, **settings))
            probe.create_topic(f"127.0.0.1:{broker.port}", "Sends", sdk.QUEUES)
            brokers[name] = broker, f"127.0.0.1:{port}"
        for _ in range(rounds):
            for row, mode in SDK_LOADS.items():
                for how, (name, more) in SDK.items():
                    os.sync()  # else dirty pages of the previous load would be written during this one
                    with ExitStack() as others:
                        for other, (broker, _namesrv) in brokers.items():
                            if other != name:
                                others.enter_context(broker.paused())
                        found = sdk.our_figures(brokers[name][1], "Sends", mode, seconds, *more)
                    raw[row][how].append(found)
                    print(f"SDK {row:10s} {how:20s} {found['msg_s']:9,.0f}/s", flush=True)
    medians = {
        row: {
            how: {figure: statistics.median(run[figure] for run in runs) for figure in ("msg_s", "cpu_us")}
            for how, runs in by_how.items()
        }
        for row, by_how in raw.items()
    }
    return {"rows": medians, "raw": raw}


def measure(parts: Sequence[str], rows: Sequence[str], rounds: int, seconds: int) -> dict[str, Any]:
    """The numbers of the parts, and of the rows of the part ``loads``."""
    found: dict[str, Any] = {"rounds": rounds, "seconds": seconds}
    with tempfile.TemporaryDirectory(prefix="trimq-security-") as directory, load_tool(Path(directory)) as tool:
        certificates = tls_certificates.make(Path(directory) / "tls")
        if "loads" in parts:
            found["rows"] = {
                row: measured(tool, certificates, list(KINDS), ROWS[row].load, rounds, seconds) for row in rows
            }
            found["ratios"] = {
                row: {f"{one} / {other}": ratio(figures, one, other) for one, other in PAIRS}
                for row, figures in found["rows"].items()
            }
        if "connections" in parts:
            found["connections"] = measured(tool, certificates, CONNECTED, CONNECT, rounds, seconds)
        if "memory" in parts:
            found["memory"] = {name: memory(name, certificates) for name in ("plain", "tls")}
        if "sdk" in parts:
            found["sdk"] = sends(certificates, rounds, seconds)
    return found


def missed(numbers: dict[str, Any]) -> list[str]:
    """The limits that were missed, and the loads that had failures or found nothing."""
    texts = []
    for (row, one, other), floor in FLOORS.items():
        reached = numbers.get("ratios", {}).get(row, {}).get(f"{one} / {other}")
        if reached is not None and reached < floor:
            texts.append(f"{row}: {one} / {other} is {reached:.2f}, at least {floor:g} is wanted")
    loads = numbers.get("rows", {}) | ({"connections": numbers["connections"]} if "connections" in numbers else {})
    for row, found in loads.items():
        for name, figures in found.items():
            if name == "raw":
                continue
            if figures["failed"] or not figures["msg_s"]:
                texts.append(
                    f"{row}, {name}: {figures['failed']} failures, {figures['msg_s']:,.0f} a second {figures['remark']}"
                )
    return texts


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", default=",".join(LOADS))
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts, rows = arguments.parts.split(","), arguments.rows.split(",")
    if set(parts) - set(PARTS) or set(rows) - set(LOADS):
        parser.error(f"--parts accepts {', '.join(PARTS)}, --rows {', '.join(LOADS)}")
    if not NATIVE.is_on:  # else our brokers would all be without it
        sys.exit(f"the native extension is needed: {NATIVE.status}")
    numbers = measure(parts, rows, arguments.rounds, arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    bad = missed(numbers)
    if bad:
        sys.exit("limits were missed:\n" + "\n".join(bad))


if __name__ == "__main__":
    main()
