"""Each mutation applies to the current code and names existing tests; the runner reports each possible outcome."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.mutations import (
    ROOT,
    Mutation,
    MutationError,
    Outcome,
    all_mutations,
    applies,
    interpreter,
    try_mutation,
)

AREAS = (
    "auth",
    "client",
    "durability",
    "gate",
    "native",
    "pipeline",
    "recovery",
    "services",
    "sql92",
    "tier",
    "transactions",
)
MUTATIONS = all_mutations()


def test_there_are_eight_of_each_area() -> None:
    count = Counter(mutation.area for mutation in MUTATIONS)
    assert set(count) == set(AREAS)
    assert min(count.values()) >= 8


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_applies_and_its_tests_exist(mutation: Mutation) -> None:
    assert applies(mutation) == ""
    for target in mutation.tests:
        path, _, name = target.partition("::")
        file = ROOT / path
        assert file.exists(), target
        if name:
            function = name.rpartition("::")[2].partition("[")[0]
            assert re.search(rf"def {function}\(", file.read_text(encoding="utf-8")), target


DIFF = """# What breaks: {what}
# Tests: test_it.py
--- a/it.py
+++ b/it.py
@@ -1,2 +1,2 @@
 def double(number):
-    return 2 * number
+    {line}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "it.py").write_text("def double(number):\n    return 2 * number\n")
    (tree / "test_it.py").write_text("from it import double\n\ndef test_it():\n    assert double(2) == 4\n")
    return tree


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("return 3 * number", Outcome.KILLED),
        ("return number + 2", Outcome.SURVIVED),
        ("return 2 *", Outcome.BROKEN),
        ("while True: pass", Outcome.TIMED_OUT),
    ],
)
def test_what_the_tests_make_of_a_mutation(tree: Path, line: str, outcome: Outcome) -> None:
    path = tree.parent / "area" / "01-it.diff"
    path.parent.mkdir()
    path.write_text(DIFF.format(what="the result", line=line))
    assert try_mutation(Mutation.read(path), tree, timeout=15 if outcome is not Outcome.TIMED_OUT else 3)[0] is outcome
    assert (tree / "it.py").read_text().endswith("return 2 * number\n")


def test_a_diff_that_does_not_apply_is_no_kill(tree: Path) -> None:
    path = tree.parent / "01-it.diff"
    path.write_text(DIFF.format(what="the result", line="return 0"))
    (tree / "it.py").write_text("def triple(number):\n    return 3 * number\n")
    assert try_mutation(Mutation.read(path), tree)[0] is Outcome.BROKEN


def test_a_diff_without_its_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "01-it.diff"
    path.write_text(DIFF.format(what="", line="return 0"))
    with pytest.raises(MutationError, match="What breaks"):
        Mutation.read(path)


def test_an_environment_that_is_not_there_is_named() -> None:
    with pytest.raises(MutationError, match=r"make \.venv-spark-none/\.stamp"):
        interpreter("spark-none")
