"""kill -9 of the driver, of Python workers and of the broker, at moments of chance, through 30 micro-batches.

What has gone in comes out: every message, once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from client.message import Message
from client.sync import Producer
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.spark.conftest import demand_spark
from tests.spark.tables import bodies, read

ROOT = Path(__file__).parents[2]
BATCHES = 30
PER_BATCH = 20
PATIENCE = 300.0  # a driver that starts again on a busy machine took 110 s to its first batch


def descendants(pid: int) -> dict[int, str]:
    """Every process below one, with its command line."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found[child] = commands[child]
            waiting.append(child)
    return found


class Scene:
    """The copying program, its broker, and who may be killed."""

    def __init__(self, cluster: Cluster, home: Path, chance: random.Random) -> None:
        self.cluster = cluster
        self.home = home
        self.chance = chance
        self.killed: Counter[str] = Counter()
        self.source, self.target = cluster.create_topic("KillIn", 3), cluster.create_topic("KillOut", 3)
        self.driver = Process(
            "driver",
            [sys.executable, "-m", "tests.spark.copying_driver", cluster.namesrv, self.source, self.target, str(home)],
            home,
            {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )

    def commits(self) -> int:
        folder = self.home / "checkpoint" / "commits"
        return sum(name.name.isdigit() for name in folder.iterdir()) if folder.exists() else 0

    def wait_for(self, commits: int) -> None:
        """Until so many batches are committed."""

        def reached() -> bool:
            if not self.driver.running:
                raise RuntimeError(f"the driver ended by itself:\n{self.driver.tail()}")
            return self.commits() >= commits

        wait_until(reached, f"batch {commits}", PATIENCE)

    def kill(self, whom: str) -> None:
        """At a moment of chance: somewhere in a micro-batch, or between two."""
        self.killed[whom] += 1
        if whom == "broker":
            self.cluster.broker.kill()
            self.cluster.broker.start()
        elif whom == "driver":
            below = descendants(self.driver.pid)
            for pid, command in below.items():
                if "java" in command.split(" ")[0]:
                    os.kill(pid, signal.SIGKILL)
            self.driver.kill()
            self.driver.start()
        else:
            self._kill_a_worker()

    def _kill_a_worker(self) -> None:
        def workers() -> list[int]:
            found = descendants(self.driver.pid)
            daemons = [pid for pid, command in found.items() if "pyspark.daemon" in command]
            return [pid for daemon in daemons for pid in descendants(daemon)]

        wait_until(workers, "a Python worker", PATIENCE)
        for pid in workers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.timeout(1500, func_only=True)
def test_thirty_batches_survive_kills_of_everyone(tmp_path: Path) -> None:
    demand_spark()
    chance = random.Random(os.environ.get("TRIMQ_KILL_SEED", "8"))
    victims = ["worker", "broker", "driver"] * 3
    moments = sorted(chance.sample(range(2, BATCHES - 2), len(victims)))
    plan = dict(zip(moments, victims, strict=True))
    with running_cluster(tmp_path / "cluster") as cluster:
        scene = Scene(cluster, tmp_path / "home", chance)
        sent = 0
        with (
            ended_afterwards(scene.driver, gracefully=False),
            Producer("kill", namesrv=cluster.namesrv, retries=10) as producer,
        ):
            scene.driver.start()
            for number in range(BATCHES):
                before = scene.commits()
                producer.send_batch([Message(scene.source, b"%06d" % (sent + n)) for n in range(PER_BATCH)])
                sent += PER_BATCH
                if number in plan:
                    # Some while after the rows came, in which a batch is planned, read, written or committed.
                    scene.wait_for(scene.commits() + chance.choice((0, 0, 1)))
                    scene.kill(plan[number])
                scene.wait_for(before + 1)
            everything = [b"%06d" % number for number in range(sent)]
            wait_until(lambda: len(read(cluster, topics=scene.target)) >= sent, "the last batch", PATIENCE)
        assert scene.killed == {"worker": 3, "broker": 3, "driver": 3}
        assert scene.commits() >= BATCHES
        assert bodies(read(cluster, topics=scene.target)) == everything
