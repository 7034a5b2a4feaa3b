"""The function of .ci/run that decides whether a change affects Spark."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def spark_changed(directory: Path, base: str = "") -> bool:
    """Run .ci/run's function of this name in another repository."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [function] = re.findall(r"^spark_changed\(\) \{\n.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["bash", "-c", f"set -uo pipefail\n{function}\nspark_changed"],
        cwd=directory,
        env={**os.environ, "CI_BASE": base},
        check=False,
        capture_output=True,
    )
    return done.returncode == 0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a commit each for pipeline/, README.md and requirements of Spark, and a branch at the last."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "work")
    for path in ("pipeline/a.py", "README.md", "requirements/spark-oldest.txt", "broker/a.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
        git("add", "-A")
        git("commit", "-q", "-m", path)
    return tmp_path


def test_a_change_for_spark_is_seen(repository: Path) -> None:
    assert spark_changed(repository, "HEAD~2")
    assert spark_changed(repository, "HEAD~3")
    assert not spark_changed(repository, "HEAD^")
    (repository / "pipeline" / "a.py").write_text("not committed yet")
    assert spark_changed(repository, "HEAD^")


def test_what_is_not_known_counts_as_changed(repository: Path) -> None:
    assert spark_changed(repository)
    assert spark_changed(repository, "HEAD")
    assert spark_changed(repository, "nosuch")


def test_the_base_is_where_the_branch_began(repository: Path) -> None:
    for commit, changed in (("HEAD^", False), ("HEAD~2", True), ("HEAD", True)):
        subprocess.run(["git", "update-ref", "refs/remotes/origin/main", commit], cwd=repository, check=True)
        assert spark_changed(repository) is changed


def test_what_has_passed_with_the_oldest_pyspark_is_not_tested_with_it_again(repository: Path) -> None:
    def digest() -> str:
        paths = ["pipeline", "pyspark_rocketmq.py", "tests/spark", "requirements/spark-oldest.txt"]
        listed = subprocess.run(
            ["git", "ls-tree", "-r", "HEAD", "--", *paths], cwd=repository, check=True, capture_output=True
        )
        hashed = subprocess.run(
            ["git", "hash-object", "--stdin"], cwd=repository, check=True, capture_output=True, input=listed.stdout
        )
        return hashed.stdout.decode()

    (repository / ".ci").mkdir()
    noted = repository / ".ci" / "oldest-pyspark-tested"
    noted.write_text(digest())
    assert not spark_changed(repository)
    assert spark_changed(repository, "HEAD~2")  # a known base counts first
    (repository / "pipeline" / "a.py").write_text("changed")
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qam", "changed"], cwd=repository, check=True
    )
    assert spark_changed(repository)


def test_the_digest_that_is_noted_is_one() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}\n", (ROOT / ".ci" / "oldest-pyspark-tested").read_text(encoding="ascii"))
