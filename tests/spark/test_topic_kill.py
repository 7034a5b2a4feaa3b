"""kill -9 of the driver, of Python workers and of the broker, at random moments during many micro-batches.

Every message of the source topic is in the target topic once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.spark.conftest import demand_spark
from tests.spark.tables import bodies, read
from trimq.client.errors import RocketMQError
from trimq.client.message import Message
from trimq.client.sync import Admin, Producer
from trimq.pipeline.topics.stream import HAS_ADMISSION_CONTROL

ROOT = Path(__file__).parents[2]
PER_BATCH = 20
LONG_KILLS = 3 if HAS_ADMISSION_CONTROL else 1
"""Kills of each of the three; fewer with the oldest PySpark, because restarts take most of the time."""
PATIENCE = 300.0
"""Time limit in seconds for each wait; on a busy machine a restarted driver took 110 s to its first batch."""


def below(pid: int) -> dict[int, str]:
    """All descendants of a process, with their command lines."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found[child] = commands[child]
            waiting.append(child)
    return found


def is_running(pid: int) -> bool:
    """Whether a process that is not a child of this one runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Scene:
    """The copying program and its broker, with methods that kill one of the processes."""

    def __init__(self, cluster: Cluster, admin: Admin, home: Path, chance: random.Random) -> None:
        self.cluster = cluster
        self.admin = admin
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

    def _noted(self, what: str) -> int:
        folder = self.home / "checkpoint" / what
        return sum(name.name.isdigit() for name in folder.iterdir()) if folder.exists() else 0

    def planned(self) -> int:
        """The number of batches whose offsets are in the checkpoint."""
        return self._noted("offsets")

    def committed(self) -> int:
        """The number of completed batches."""
        return self._noted("commits")

    def written(self) -> int:
        """The number of rows in the target, 0 if the broker does not answer."""
        try:
            return sum(offset.max_offset for offset in self.admin.topic_stats(self.target).values())
        except RocketMQError:
            return 0

    def wait_for_more(self, count: Callable[[], int], than: int) -> None:
        """Wait until the driver's count exceeds ``than``."""

        def reached() -> bool:
            if not self.driver.running:
                raise RuntimeError(f"the driver ended without a kill:\n{self.driver.tail()}")
            return count() > than

        wait_until(reached, f"{count.__name__} more than {than}", PATIENCE)

    def kill(self, whom: str) -> None:
        self.killed[whom] += 1
        if whom == "broker":
            self.cluster.broker.kill()
            self.cluster.broker.start()
        elif whom == "driver":
            self._kill_the_driver()
        else:
            self._kill_workers()

    def _kill_the_driver(self) -> None:
        """Kill the program and its JVM; its Python workers end when they notice."""
        processes = below(self.driver.pid)
        for pid, command in processes.items():
            if Path(command.split(" ")[0]).name == "java":
                os.kill(pid, signal.SIGKILL)
        self.driver.kill()
        # The guarantee does not cover two concurrent runs of one task, as documented in docs/pipeline.md.
        wait_until(lambda: not any(map(is_running, processes)), "the end of the driver's workers", PATIENCE)
        self.driver.start()

    def _kill_workers(self) -> None:
        """Kill some or all of the current workers, busy or idle."""

        def workers() -> list[int]:
            daemons = [pid for pid, command in below(self.driver.pid).items() if "pyspark.daemon" in command]
            return sorted({pid for daemon in daemons for pid in below(daemon)})

        found = wait_until(workers, "a Python worker", PATIENCE)
        for pid in self.chance.sample(found, self.chance.randint(1, len(found))):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.timeout(1500, func_only=True)
@pytest.mark.parametrize(("batches", "kills"), [(10, 1), pytest.param(30, LONG_KILLS, marks=pytest.mark.nightly)])
def test_batches_survive_kills_of_everyone(tmp_path: Path, batches: int, kills: int) -> None:
    demand_spark()
    chance = random.Random(os.environ.get("TRIMQ_KILL_SEED", "8"))
    victims = ["worker", "broker", "driver"] * kills
    chance.shuffle(victims)
    rounds = sorted(chance.sample(range(1, batches - 1), len(victims)))
    plan = dict(zip(rounds, victims, strict=True))
    with running_cluster(tmp_path / "cluster") as cluster, Admin(cluster.namesrv) as admin:
        scene = Scene(cluster, admin, tmp_path / "home", chance)
        sent = 0
        with (
            ended_afterwards(scene.driver, gracefully=False),
            Producer("kill", namesrv=cluster.namesrv, retries=10) as producer,
        ):
            scene.driver.start()
            for number in range(batches):
                planned, written, committed = scene.planned(), scene.written(), scene.committed()
                producer.send_batch([Message(scene.source, b"%06d" % (sent + n)) for n in range(PER_BATCH)])
                sent += PER_BATCH
                if number in plan:
                    # Before these rows are in a batch, when their batch is planned, partly written, or committed.
                    moment = chance.choice(("sent", "planned", "written", "committed"))
                    if moment == "planned":
                        scene.wait_for_more(scene.planned, planned)
                    elif moment == "written":
                        scene.wait_for_more(scene.written, written)
                    elif moment == "committed":
                        scene.wait_for_more(scene.committed, committed)
                    scene.kill(plan[number])
                scene.wait_for_more(scene.committed, committed)
            wait_until(lambda: scene.written() >= sent, "the last rows", PATIENCE)
            scene.wait_for_more(scene.committed, batches - 1)
        assert scene.killed == dict.fromkeys(("worker", "broker", "driver"), kills)
        assert bodies(read(cluster, topics=scene.target)) == [b"%06d" % number for number in range(sent)]
