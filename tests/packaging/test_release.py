"""``make release``: what it refuses, and a release of a clone with everything that it checks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import copied
from tests.packaging.rust import demanded
from trimq.protocol.native import VERSION


def git(tree: Path, *words: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(["git", *identity, *words], cwd=tree, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The tree as it is here, committed, with a link to the environment that runs this test."""
    tree = copied(tmp_path / "clone")
    git(tree, "init", "--quiet")
    (tree / ".git/info/exclude").write_text("/.venv\n", encoding="utf-8")
    (tree / ".venv").symlink_to(sys.prefix)
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "as it is")
    return tree


def release(tree: Path, version: str) -> tuple[int, str]:
    names = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        [tree / ".ci/release"],
        env={**os.environ, **names, "VERSION": version, "NATIVE": "on" if demanded() else "off"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_release_needs_a_version_a_clean_tree_and_something_new(clone: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    assert release(clone, "next") == (2, "release: VERSION=next is not a version; use: make release VERSION=1.2.3\n")
    git(clone, "tag", "v1.2.3")
    assert release(clone, "1.2.3") == (2, "release: the tag v1.2.3 exists already\n")
    (clone / "README.md").write_text("mine\n", encoding="utf-8")
    assert release(clone, "1.2.4") == (2, "release: there are uncommitted changes (git status)\n")
    git(clone, "checkout", "README.md")
    git(clone, "rm", "--quiet", "changelog.d/*.*.md")
    git(clone, "commit", "--quiet", "--message", "nothing new")
    assert release(clone, "1.2.4") == (2, "release: changelog.d has no fragment: there is nothing to release\n")
    assert git(clone, "rev-parse", "HEAD~") == head


def test_a_release_that_fails_leaves_nothing(clone: Path) -> None:
    """A project that cannot be built: found after the changelog was made."""
    project = (clone / "pyproject.toml").read_text(encoding="utf-8")
    (clone / "pyproject.toml").write_text(project.replace('license-files = ["LICENSE"]', "license-files = 5"))
    git(clone, "commit", "--quiet", "--all", "--message", "broken")
    head = git(clone, "rev-parse", "HEAD")
    code, text = release(clone, "1.2.3")
    assert code
    assert text.endswith("release: FAILED, nothing is released\n")
    assert (git(clone, "status", "--porcelain"), git(clone, "tag"), git(clone, "rev-parse", "HEAD")) == ("", "", head)


@pytest.mark.partners
@pytest.mark.timeout(600)
def test_a_release_is_checked_committed_and_tagged(clone: Path) -> None:
    code, text = release(clone, "1.2.3")
    assert code == 0, text
    assert "released: commit and tag v1.2.3, dist/1.2.3;" in text
    assert git(clone, "show", "--no-patch", "--format=%s", "v1.2.3^{commit}") == "Release 1.2.3\n"
    pure, sources, *native = sorted(path.name for path in (clone / "dist/1.2.3").iterdir())
    assert (pure, sources) == ("trimq-1.2.3-py3-none-any.whl", "trimq-1.2.3.tar.gz")
    assert len(native) == demanded()
    for name in native:
        assert re.fullmatch(rf"trimq_native-{VERSION}-cp311-abi3-manylinux_2_\d+_\w+\.whl", name)
    changes = (clone / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## 1.2.3 (" in changes
    assert "### Added" in changes
    assert "### Fixed" in changes
    assert 'version = "1.2.3"' in (clone / "pyproject.toml").read_text(encoding="utf-8")
