"""The pipeline profile: a job with PySpark beside the cluster counts a topic's messages by tag, as Parquet."""

import json
from pathlib import Path

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


def test_the_parquet_equals_what_was_sent(pipeline_image: Docker, tmp_path: Path) -> None:
    """The commands of docs/operate.md: the job runs at the start and when it is asked to."""
    docker, outside = pipeline_image, f"{ADDRESS}:9876;{ADDRESS}:9886"
    with docker.up("cluster", *SERVERS):
        try:
            job("send", outside, "orders", 100)
            job("send", outside, "payments", 10)
            docker.type_in("operate pipeline", tmp_path)
            assert table(docker, "/tables/payments_by_tag") == {"third": 4, "other": 6}
            wait_until(lambda: docker.state("pipeline")["Status"] == "exited", "the first run has ended", 120)
            assert docker.state("pipeline")["ExitCode"] == 0, docker.compose("pipeline", "logs", "pipeline")
            assert table(docker, "/tables/orders_by_tag") == {"third": 34, "other": 66}
        finally:
            docker.compose("pipeline", "down", "-v")
