"""Functions of .ci/run: how it runs commands and records their results, and whether a change affects Spark."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.interop.harness.waiting import wait_until

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


def steps(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with .ci/run's functions that run and record commands; they use ``directory`` for files."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [functions] = re.findall(r"^failed=\(\)\n.*?(?=^# The Spark parts)", text, re.MULTILINE | re.DOTALL)
    return subprocess.run(
        ["bash", "-c", f"set -uo pipefail\n{functions}\n{script}"],
        cwd=directory,
        env={**os.environ, "TMPDIR": str(directory)},
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_a_command_runs_beside_the_steps_at_the_lowest_priority(tmp_path: Path) -> None:
    done = steps(
        tmp_path,
        """
        mkfifo go
        begin_beside long sh -c 'read line <go; chrt -p $$; exit 3'
        step short sh -c 'echo now >go'
        end_beside
        printf '%s\\n' "${timings[@]}" "${failed[@]}"
        """,
    )
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[:3] == ["==> long (begins, beside the steps that follow)", "==> short", "==> long (ends)"]
    assert lines[3].endswith(" SCHED_IDLE")
    assert [line.split()[2:] for line in lines[-3:-1]] == [["short", "passed"], ["long", "FAILED"]]
    assert lines[-1] == "long"
    assert {path.name for path in tmp_path.iterdir()} == {"go"}


def test_a_command_that_passes_beside_the_steps_is_no_failure(tmp_path: Path) -> None:
    done = steps(tmp_path, 'begin_beside long true\nend_beside\nexit "${#failed[@]}"')
    assert done.returncode == 0, done.stderr


def test_what_begins_beside_the_steps_when_no_time_is_left_is_ended(tmp_path: Path) -> None:
    done = steps(tmp_path, 'limit=0\nbegin_beside late sleep 60\nend_beside\nprintf "%s\\n" "${failed[@]}"')
    assert done.stdout.splitlines()[-1] == "late"


def test_what_runs_beside_the_steps_ends_with_them(tmp_path: Path) -> None:
    script = """
        mkfifo pid
        begin_beside long sh -c 'echo $$ >pid; sleep 60'
        read line <pid
        echo $line
        exit 1
        """
    done = steps(tmp_path, script)
    assert done.returncode == 1
    pid = Path("/proc", done.stdout.split()[-1])
    wait_until(lambda: not pid.exists(), "end of the command")
    assert {path.name for path in tmp_path.iterdir()} == {"pid"}


def test_a_step_that_hangs_is_ended_and_named_and_none_begins_after_it(tmp_path: Path) -> None:
    done = steps(tmp_path, "limit=1\nstep one sleep 60\nstep two touch began\nprintf '%s\\n' \"${failed[@]}\"")
    said = "there is no time left, 1 s are over"
    assert [line for line in done.stdout.splitlines() if line] == [
        "==> one",
        f"one: {said}",
        "==> two",
        f"two: {said}",
        "one",
        "two",
    ]
    assert not list(tmp_path.iterdir())


def test_the_reasons_of_tests_that_fail_are_kept(tmp_path: Path) -> None:
    """Of steps, and of the command beside them."""
    script = r"""
        begin_beside long printf 'ERROR tests/b.py::two - a "reason"\n'
        step short printf 'FAILED tests/a.py::one[x y] - assert 1 == 2\nFAILED no test\n.F.\n'
        end_beside
        echo "kept:"
        cat "$reasons"
        """
    done = steps(tmp_path, script)
    shown, kept = done.stdout.split("kept:\n")
    assert kept.splitlines() == ["FAILED tests/a.py::one[x y] - assert 1 == 2", 'ERROR tests/b.py::two - a "reason"']
    assert all(line in shown for line in kept.splitlines())


def test_a_process_that_a_step_leaves_behind_holds_nothing_up(tmp_path: Path) -> None:
    script = """
        step one sh -c 'sleep 60 & echo $! >pid'
        kill $(cat pid)
        echo "${#failed[@]} failed"
        """
    done = steps(tmp_path, script)
    assert done.stdout.splitlines()[-1] == "0 failed"
