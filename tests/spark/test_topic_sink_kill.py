"""kill -9 of a writing task and of the broker at random moments: with idempotent=true every row is stored once."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.spark.tables import bodies, read

pytestmark = pytest.mark.one_pyspark

ROOT = Path(__file__).parents[2]
ROWS = 3000
EVERYTHING = [b"%06d" % number for number in range(ROWS)]


def task(cluster: Cluster, topic: str, directory: Path) -> Process:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.spark.writing_task", cluster.namesrv, topic, str(ROWS)]
    return Process("writing-task", command, directory, {"PYTHONPATH": path})


def stored(cluster: Cluster, topic: str) -> int:
    return len(read(cluster, topics=topic))


def feed(writing: Process, batches: int) -> None:
    assert writing.child.stdin is not None
    writing.child.stdin.write(b"\n" * batches)
    writing.child.stdin.flush()


def close_pipes(writing: Process) -> None:
    for pipe in (writing.child.stdin, writing.child.stdout):
        if pipe is not None:
            pipe.close()


def finish(writing: Process) -> None:
    close_pipes(writing)
    assert writing.wait_for_exit(90) == 0, writing.tail()


@pytest.mark.parametrize("seed", range(2))
def test_a_task_that_is_killed_and_run_again(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    topic = cluster.create_topic(f"SinkKilled{seed}", 2)
    chance = random.Random(seed)
    writing = task(cluster, topic, tmp_path)
    with ended_afterwards(writing, gracefully=False):
        taken = 0
        for _ in range(3):
            writing.start(piped=True)
            taken += chance.randrange(2, 8)
            feed(writing, taken)
            # The task holds back a few rows until their batch is full.
            goal = 100 * taken - 99
            wait_until(lambda goal=goal: stored(cluster, topic) >= goal, "rows of this run", 60)  # type: ignore[misc]
            feed(writing, 5)
            taken += 5
            for _ in range(chance.randrange(20_000)):
                pass
            writing.kill()
            close_pipes(writing)
        writing.start(piped=True)
        finish(writing)
    assert bodies(read(cluster, topics=topic)) == EVERYTHING


def test_a_broker_that_is_killed_while_rows_are_written(tmp_path: Path) -> None:
    chance = random.Random(3)
    with running_cluster(tmp_path / "cluster") as cluster:
        topic = cluster.create_topic("SinkBrokerKilled", 2)
        writing = task(cluster, topic, tmp_path)
        with ended_afterwards(writing, gracefully=False):
            writing.start(piped=True)
            taken = 0
            for _ in range(2):
                taken += chance.randrange(2, 8)
                feed(writing, taken)
                wait_until(lambda: stored(cluster, topic) > 0, "some rows", 60)
                feed(writing, 5)
                cluster.broker.kill()
                cluster.broker.start()
            finish(writing)
        assert bodies(read(cluster, topics=topic)) == EVERYTHING
