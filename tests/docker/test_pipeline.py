"""The pipeline profile: a job with PySpark beside the cluster counts a topic's messages by tag, as Parquet."""

import json

import pytest

from tests.docker.daemon import ADDRESS, Docker, job
from tests.interop.harness.waiting import wait_until

pytestmark = [pytest.mark.partners, pytest.mark.timeout(600)]

SERVERS = ("namesrv-a", "namesrv-b", "broker-a", "broker-b")
SHOW = "import json, sys, pyarrow.parquet as p; json.dump(p.read_table(sys.argv[1]).to_pylist(), sys.stdout)"


def table(docker: Docker, path: str) -> dict[str | None, int]:
    """The Parquet files as they are, read without Spark."""
    rows = docker.run(
        *("docker", "run", "--rm", "-v", "trimqtest_tables:/tables:ro", "--entrypoint", "python3"),
        *("trimq-pipeline", "-c", SHOW, path),
    )
    return {row["tags"]: row["count"] for row in json.loads(rows)}


def test_the_parquet_equals_what_was_sent(pipeline_image: Docker) -> None:
    docker, outside = pipeline_image, f"{ADDRESS}:9876;{ADDRESS}:9886"
    with docker.up("cluster", *SERVERS):
        job("send", outside, "orders", 100)
        docker.compose("pipeline", "up", "-d")
        ended = wait_until(lambda: docker.state("pipeline")["Status"] == "exited", "the job has ended", 180)
        assert ended
        assert docker.state("pipeline")["ExitCode"] == 0, docker.compose("pipeline", "logs", "pipeline")
        assert table(docker, "/tables/orders_by_tag") == {"third": 34, "other": 66}
        job("send", outside, "Payments", 10)
        docker.compose("pipeline", "run", "--rm", "pipeline", "Payments", "/tables/payments", timeout=180)
        assert table(docker, "/tables/payments") == {"third": 4, "other": 6}
        docker.compose("pipeline", "down", "-v")
