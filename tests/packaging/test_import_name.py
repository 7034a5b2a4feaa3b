"""Everything is imported as ``trimq.FOLDER``, in a checkout, in a wheel and in a wheel made from an sdist."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.canary import permit
from tests.packaging.checkout import ROOT, copied, files

FOLDERS = sorted(path.name for path in (ROOT / "trimq").iterdir() if path.is_symlink())
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def run(code: str, cwd: Path, path: Path) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.extend({[path for path in sys.path if 'packages' in path]})\n{code}",
        ],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout + done.stderr


def build(kind: str, source: Path, target: Path) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(words, cwd=source, capture_output=True, text=True, check=True, timeout=60)
    (made,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def files_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel built from the checkout, and one built from its sdist."""
    place = tmp_path_factory.mktemp("wheels")
    permit(f"{place}/*")  # the sources of tests name their secrets
    checkout = copied(place / "checkout")
    with tarfile.open(build("sdist", checkout, place / "sdist")) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (unpacked,) = (place / "unpacked").iterdir()
    return build("wheel", checkout, place / "direct"), build("wheel", unpacked, place / "from-sdist")


def test_a_wheel_made_from_an_sdist_has_the_same_files(wheels: tuple[Path, Path]) -> None:
    direct, from_sdist = map(files_of, wheels)
    assert direct == from_sdist
    modules = {
        f"trimq/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }  # fmt: skip
    assert modules | {
        "trimq/__init__.py",
        "trimq/py.typed",
        "trimq/protocol/codes.toml",
        "trimq/protocol/properties.toml",
    } <= set(direct)


def test_nothing_else_is_at_the_top_of_a_wheel(wheels: tuple[Path, Path]) -> None:
    top = {name.split("/", 1)[0] for name in files_of(wheels[0])}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "trimq",
        "pyspark_rocketmq.py",
        "pyspark_rocketmq_store.py",
    }


def test_a_wheel_works_beside_packages_of_the_user_with_the_same_names(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheels[1]) as archive:
        archive.extractall(tmp_path / "installed")
    for name in ("client", "protocol", "broker"):
        (tmp_path / "program" / name).mkdir(parents=True)
        (tmp_path / "program" / name / "__init__.py").write_text("mine = True\n", encoding="utf-8")
    code = """
import client, protocol, broker
from trimq import Consumer, Message, Producer
import trimq.broker.cli, trimq.controller.cli, trimq.namesrv.cli, trimq.client.mqadmin, trimq.broker.tools.cli
print(client.mine and protocol.mine and broker.mine, Producer.__module__, trimq.broker.cli.__file__)
"""
    printed = run(code, tmp_path / "program", tmp_path / "installed")
    assert printed.split() == ["True", "trimq.client.producer", f"{tmp_path}/installed/trimq/broker/cli.py"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_refuses_another_name_than_its_own(folder: str) -> None:
    """A checkout's root is on sys.path: a module imported under a second name would have its own set of classes."""
    printed = run(f"import {folder}", ROOT, ROOT)
    assert f"ImportError: this package is trimq.{folder}: import it by that name, not as {folder}" in printed
    assert run(f"import trimq.{folder}", ROOT, ROOT) == ""


def test_a_layout_is_imported_without_the_sdk() -> None:
    code = "import trimq.protocol.record; print([name for name in sys.modules if name.startswith('trimq.client')])"
    assert run(code, ROOT, ROOT) == "[]\n"


def test_trimq_has_the_names_of_the_sdk_and_says_which_it_has_not() -> None:
    code = """
import trimq, trimq.client
from trimq import *
assert trimq.Producer is trimq.client.Producer is Producer
assert set(trimq.client.__all__) <= set(dir(trimq))
print(trimq.Nothing)
"""
    assert run(code, ROOT, ROOT).endswith("AttributeError: module 'trimq' has no attribute 'Nothing'\n")


def test_the_lists_of_folders_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["sources"] == {folder: f"trimq/{folder}" for folder in FOLDERS}
    assert sorted(name for name in wheel["only-include"] if "." not in name) == FOLDERS
    assert re.search(r"^PACKAGES := (.*)$", MAKEFILE, re.MULTILINE)[1].split() == sorted(FOLDERS, key=MAKEFILE.index)  # type: ignore[index]
    for folder in FOLDERS:
        assert (ROOT / "trimq" / folder).readlink() == Path(f"../{folder}")


def test_make_compiles_every_module_under_the_name_by_which_it_is_imported(tmp_path: Path) -> None:
    """compileall does not follow links: for trimq/ alone it would compile only its ``__init__``."""
    tree = copied(tmp_path)
    command = re.search(r"^compile = \$\(BIN\)/python (.*)$", MAKEFILE, re.MULTILINE)[1]  # type: ignore[index]
    words = shlex.split(command.replace("$(PACKAGES)", re.search(r"^PACKAGES := (.*)$", MAKEFILE, re.MULTILINE)[1]))  # type: ignore[index]
    subprocess.run([sys.executable, *words], cwd=tree, check=True, timeout=60)
    modules = [tree / "trimq" / "__init__.py"]
    for folder in FOLDERS:
        modules += [tree / "trimq" / path.relative_to(tree) for path in (tree / folder).rglob("*.py")]
    assert len(modules) > 300
    assert [path for path in modules if not Path(importlib.util.cache_from_source(str(path))).exists()] == []


NAMES = "|".join(FOLDERS)
BARE = (
    re.compile(rf"(?m)^[ +>.]*(?:from|import) (?:{NAMES})(?:\.\w|$| import| as)"),
    re.compile(rf"[;\"'] ?(?:from|import) (?:{NAMES})(?:\.| import)"),
    re.compile(rf"-m(?: |\", \"|', ')(?:{NAMES})(?=[\s\"'`.])"),
)
DOTTED = re.compile(rf"[\"'`](?:python -m )?({NAMES})\.(\w+)")
READ = {"", ".diff", ".md", ".py", ".service", ".sh", ".toml", ".yaml", ".yml"}


def bare_names(text: str) -> list[str]:
    """Find folder names without ``trimq.`` in imports, after ``-m``, and in quoted dotted names of existing modules."""
    found = [match[0].strip() for pattern in BARE for match in pattern.finditer(text)]
    for match in DOTTED.finditer(text):
        module = ROOT / match[1] / match[2]
        if module.is_dir() or module.with_suffix(".py").is_file():
            found.append(match[0])
    return found


def test_no_bare_name_is_left() -> None:
    paths = [ROOT / name for name in files() if name not in {"pyproject.toml", "LICENSE"}]
    texts = [path for path in paths if path.suffix in READ and path.is_file() and path != Path(__file__)]
    assert len(texts) > 700
    found = {str(path): names for path in texts if (names := bare_names(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "from client import Producer",
        "    import broker.cli",
        "+import protocol as p",
        "'import client.sync'",
        "-m broker -c",
        '"-m", "namesrv"',
        'setattr("client.core.x", 1)',
        "``pipeline.jobs``",
        "`python -m pipeline.jobs`",
    ],
)
def test_a_bare_name_is_found(text: str) -> None:
    assert bare_names(f"{text}\n")
