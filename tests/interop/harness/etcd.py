"""A real etcd of one or three members, from Debian's etcd-server."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.waiting import wait_until
from tests.ports import free_port


@dataclass
class Member:
    """One process of etcd."""

    name: str
    client: str
    process: Process

    def status(self) -> dict[str, object]:
        """What it says of itself; empty if it does not answer."""
        try:
            request = urllib.request.Request(f"{self.client}/v3/maintenance/status", data=b"{}")
            with urllib.request.urlopen(request, timeout=2) as reply:
                found: dict[str, object] = json.load(reply)
                return found
        except (OSError, urllib.error.URLError, ValueError):
            return {}

    @property
    def leads(self) -> bool:
        status = self.status()
        header = status.get("header")
        return isinstance(header, dict) and bool(status.get("leader")) and status["leader"] == header.get("member_id")


@dataclass
class Etcd:
    """The members of one cluster."""

    members: list[Member]

    @property
    def endpoints(self) -> str:
        """As ``etcdEndpoints`` of a controller."""
        return ";".join(member.client for member in self.members)

    def leader(self) -> Member | None:
        """The running member that leads; None if there is none now."""
        return next((one for one in self.members if one.process.running and one.leads), None)

    def wait_for_leader(self) -> Member:
        return wait_until(self.leader, "a leader of etcd", 60)


def etcd_program() -> str:
    """Path of etcd. Without it the test is skipped, and fails where partners must not be missing (CI=true)."""
    found = shutil.which("etcd")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("etcd is not installed (Debian's etcd-server)")
        pytest.skip("etcd is not installed (Debian's etcd-server)")
    return found


@contextmanager
def running_etcd(directory: Path, members: int = 3) -> Iterator[Etcd]:
    """Run etcd. It has a leader when the block begins."""
    program = etcd_program()
    ports = [(free_port(), free_port()) for _ in range(members)]
    cluster = ",".join(f"m{at}=http://127.0.0.1:{peer}" for at, (_, peer) in enumerate(ports))
    found: list[Member] = []
    with ExitStack() as stack:
        for at, (client, peer) in enumerate(ports):
            own, other = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
            process = Process(
                f"etcd-{at}",
                [
                    program,
                    *("--name", f"m{at}", "--data-dir", str(directory / f"m{at}")),
                    *("--listen-client-urls", own, "--advertise-client-urls", own),
                    *("--listen-peer-urls", other, "--initial-advertise-peer-urls", other),
                    *("--initial-cluster", cluster, "--initial-cluster-state", "new"),
                ],
                directory / f"etcd-{at}",
            )
            stack.enter_context(ended_afterwards(process))
            process.start()
            found.append(Member(f"m{at}", own, process))
        etcd = Etcd(found)
        etcd.wait_for_leader()
        yield etcd
