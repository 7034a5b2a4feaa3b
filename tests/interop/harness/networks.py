"""Network namespaces of this machine that stand for hosts: each direction between two of them can be cut.

They need root, and are removed at the end. A cut drops packets on their way out, as a broken switch does: connections
stay open and are silent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.interop.harness.processes import Process

PREFIX = "10.213"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Host:
    """A namespace with one address."""

    name: str
    address: str

    def runs(self, process: Process) -> None:
        """Let a process, which has not started, run on this host."""
        process.argv = ["ip", "netns", "exec", self.name, *process.argv]

    def _filter(self, action: str, other: Host) -> None:
        drop = ("OUTPUT", "-d", other.address, "-j", "DROP")
        _run("ip", "netns", "exec", self.name, "iptables", action, *drop)

    @contextmanager
    def cut_from(self, *others: Host, back: bool = True) -> Iterator[None]:
        """Nothing goes from here to the others, and nothing comes ``back``, until the block ends."""
        pairs = [(self, other) for other in others] + [(other, self) for other in others if back]
        with ExitStack() as stack:
            for one, other in pairs:
                one._filter("-A", other)
                stack.callback(one._filter, "-D", other)
            yield


@contextmanager
def network(names: list[str]) -> Iterator[list[Host]]:
    """Hosts on one bridge, which this process reaches too. Skipped without root, which fails with CI=true."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "iptables"))):
        reason = "network namespaces need root, ip and iptables"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    net = f"{PREFIX}.{os.getpid() % 250 + 1}"
    mark = f"t{os.getpid() % 100000}"
    bridge = f"{mark}br"
    with ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "addr", "add", f"{net}.1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        hosts = []
        for at, name in enumerate(names):
            host = Host(f"{mark}-{name}", f"{net}.{at + 2}")
            outside, inside = f"{mark}o{at}", f"{mark}i{at}"
            _run("ip", "netns", "add", host.name)
            stack.callback(_run, "ip", "netns", "del", host.name)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", host.name)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            within = ("ip", "-n", host.name)
            _run(*within, "addr", "add", f"{host.address}/24", "dev", inside)
            _run(*within, "link", "set", inside, "up")
            _run(*within, "link", "set", "lo", "up")
            hosts.append(host)
        yield [Host("", f"{net}.1"), *hosts]
