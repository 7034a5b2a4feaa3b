"""The native extension is built where Rust is installed; elsewhere one line reports that it is missing.

Most tests call ``make run`` with a copy of the Makefile, and scripts in place of Python, Rust and the broker that log
their calls. The last ones build a fresh clone, with Rust and without.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.docs.examples import ROOT
from tests.interop.harness import partners, probe
from tests.interop.harness.processes import Process, ended_afterwards
from tests.interop.harness.waiting import wait_until
from tests.packaging.checkout import copied
from tests.packaging.rust import need
from tests.ports import broker_port, free_port
from trimq.protocol.native import VERSION

CARGO = tomllib.loads((ROOT / "native" / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["package"]
RUST = CARGO["rust-version"]
HOW = f"Rust {RUST} or later (https://rustup.rs)"
WHEEL = f"trimq_native-{VERSION}-cp311-abi3-any.whl"
TOOLS = [
    "bash",
    "cat",
    "cp",
    "dirname",
    "env",
    "find",
    "grep",
    "head",
    "ls",
    "make",
    "mkdir",
    "pwd",
    "rm",
    "sed",
    "sh",
    "sort",
    "tail",
    "touch",
]

PYTHON = """#!/bin/sh
echo "python $*" >> "$CALLS"
case "$*" in
*" wheel "*) [ ! -e "$CALLS.broken" ] || { echo "error: no such crate"; exit 1; }
    while [ "$1" != --wheel-dir ]; do shift; done; touch "$2/WHEEL" ;;
*" install "*) mkdir -p "ENVIRONMENT/lib/python3.11/site-packages/trimq_native" ;;
*" uninstall "*) rm -r "ENVIRONMENT/lib/python3.11/site-packages/trimq_native" ;;
esac
"""
BUILT, INSTALLED, UNINSTALLED, RUN = "built", "installed", "uninstalled", "run"


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


class Tree:
    """A checkout with an environment that lacks only the extension, and a PATH without Rust."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = root / "calls"
        for name in ("Makefile", "pyproject.toml", "native/make-wheel", "native/Cargo.toml"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
        shutil.copytree(ROOT / "requirements", root / "requirements")
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (root / "path").mkdir(exist_ok=True)
            (root / "path" / tool).symlink_to(found)
        self.environment(".venv", ".venv", ".build", ".run", ".dev")
        script(root / ".venv/bin/mqbroker", '#!/bin/sh\necho "run TRIMQ_NATIVE=$TRIMQ_NATIVE" >> "$CALLS"\n')

    def environment(self, name: str, *stamps: str) -> None:
        script(self.root / name / "bin/python", PYTHON.replace("ENVIRONMENT", name).replace("WHEEL", WHEEL))
        for stamp in stamps:
            (self.root / name / f"{stamp}-stamp").touch()

    def rust(self, version: str | None, components: str = "fmt clippy") -> None:
        """Install a fake rustc of this version; None removes it."""
        for name in ("cargo", "rustc"):
            (self.root / "path" / name).unlink(missing_ok=True)
        if version is not None:
            script(self.root / "path/rustc", f"#!/bin/sh\necho 'rustc {version} (0123 2025-01-01)'\n")
            known = f'case " {components} test " in *" $1 "*) echo "cargo $*" >> "$CALLS" ;; *) exit 101 ;; esac'
            script(self.root / "path/cargo", f"#!/bin/sh\n{known}\n")

    def break_build(self, *, broken: bool) -> None:
        (self.root / "calls.broken").unlink(missing_ok=True)
        if broken:
            (self.root / "calls.broken").touch()

    def change(self) -> None:
        """Make a source of the extension newer than its build."""
        older = (self.root / "native/Cargo.toml").stat().st_mtime - 10
        os.utime(self.root / "build/native/stamp", (older, older))

    def make(self, *words: str, code: int = 0, **environment: str) -> tuple[list[str], str]:
        """Run make; return the logged calls and make's output."""
        self.calls.write_text("", encoding="utf-8")
        done = subprocess.run(
            [self.root / "path/make", *words],
            cwd=self.root,
            env={"PATH": str(self.root / "path"), "CALLS": str(self.calls), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=30,
        )
        assert (2 if done.returncode else 0) == code, done.stdout
        calls = []
        for line in self.calls.read_text(encoding="utf-8").splitlines():
            for part, name in (
                (" wheel ", BUILT),
                (" install ", INSTALLED),
                (" uninstall ", UNINSTALLED),
                ("run ", RUN),
            ):
                if part in line:
                    calls.append(name)
        return calls, done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("native: ")]


@pytest.mark.parametrize(
    ("version", "missing"),
    [(None, "cargo is not in PATH"), ("1.63.0", "Rust 1.63.0 is too old"), ("unknown", "rustc reports no version")],
)
def test_without_rust_a_line_says_so_and_the_broker_starts(tree: Tree, version: str | None, missing: str) -> None:
    tree.rust(version)
    for _ in range(2):
        done, printed = tree.make("run")
        assert done == [RUN]
        assert lines(printed) == [
            f"native: {missing}: TriMQ works without it; for the native extension, {HOW} and make native"
        ]
    tree.rust(RUST)  # once Rust is installed, the extension is built without a further command
    assert tree.make("run")[0] == [BUILT, INSTALLED, RUN]


def test_it_is_built_once_and_again_after_a_change(tree: Tree) -> None:
    tree.rust(RUST + ".0")
    done, printed = tree.make("run")
    assert done == [BUILT, INSTALLED, RUN]
    assert lines(printed) == []
    assert tree.make("run")[0] == [RUN]
    tree.change()
    assert tree.make("run")[0] == [BUILT, INSTALLED, RUN]


def test_the_wheel_that_was_built_is_what_is_installed(tree: Tree) -> None:
    tree.rust("1.100.0")
    tree.make("run")
    commands = [line for line in tree.calls.read_text(encoding="utf-8").splitlines() if " -m pip " in line]
    assert "--no-build-isolation" in commands[0]
    assert commands[1].endswith(f"install --no-index --no-deps --force-reinstall build/native/{WHEEL}")


def test_every_environment_gets_the_same_wheel(tree: Tree) -> None:
    tree.rust(RUST)
    tree.environment(".venv-newest", ".venv", ".build", ".run", ".newest")
    assert tree.make(".venv-newest/.native-stamp", ".venv/.native-stamp", "-o", ".venv-newest/.newest-stamp")[0] == [
        BUILT,
        INSTALLED,
        INSTALLED,
    ]
    assert (tree.root / ".venv-newest/lib/python3.11/site-packages/trimq_native").is_dir()
    assert tree.make("VENV=.venv-newest", ".venv-newest/.native-stamp", "-o", ".venv-newest/.run-stamp")[0] == []


def test_a_build_that_fails_says_where_to_look_and_is_not_tried_each_time(tree: Tree) -> None:
    tree.rust(RUST)
    tree.break_build(broken=True)
    done, printed = tree.make("run")
    assert done == [BUILT, RUN]
    assert lines(printed) == [
        "native: the build failed (build/native/build.log): TriMQ works without it; make native tries again"
    ]
    assert "no such crate" in (tree.root / "build/native/build.log").read_text(encoding="utf-8")
    assert tree.make("run")[0] == [RUN]
    done, printed = tree.make("native", code=2)
    assert done == [BUILT]
    assert "no such crate" in printed
    tree.break_build(broken=False)
    assert tree.make("native")[0] == [BUILT, INSTALLED]
    assert tree.make("run")[0] == [RUN]


@pytest.mark.parametrize("broken", [True, False])
def test_what_older_sources_made_does_not_stay(tree: Tree, broken: bool) -> None:
    tree.rust(RUST)
    tree.make("run")
    tree.change()
    tree.break_build(broken=broken)
    if not broken:
        tree.rust(None)
    done, printed = tree.make("run")
    assert done == [*[BUILT] * broken, UNINSTALLED, RUN]
    assert len(lines(printed)) == 1
    assert not (tree.root / ".venv/lib/python3.11/site-packages/trimq_native").exists()
    assert tree.make("run")[0] == [RUN]


def test_native_off_leaves_it_out_and_off(tree: Tree) -> None:
    tree.rust(RUST)
    assert tree.make("run", "NATIVE=off") == ([RUN], "")
    assert "run TRIMQ_NATIVE=off" in tree.calls.read_text(encoding="utf-8")
    tree.make("run")
    assert "run TRIMQ_NATIVE=\n" in tree.calls.read_text(encoding="utf-8")
    done, printed = tree.make("run", "NATIVE=no", code=2)
    assert done == []
    assert "NATIVE=no: expected on or off" in printed


def test_make_native_without_rust_fails(tree: Tree) -> None:
    done, printed = tree.make("native", code=2)
    assert done == []
    assert lines(printed)[0].startswith("native: cargo is not in PATH: ")


@pytest.mark.parametrize(("target", "components"), [("test-native", "cargo"), ("check-native", "fmt clippy")])
def test_checks_of_rust_are_left_out_without_it_but_not_in_ci(tree: Tree, target: str, components: str) -> None:
    reason = f"native: cargo is not in PATH; for this, Rust {RUST} or later with {components} (https://rustup.rs)"
    printed = tree.make(target)[1]
    assert printed == f"{reason}\n{target}: skipped\n"
    printed = tree.make(target, code=2, CI="true")[1]
    assert reason in printed
    assert "skipped" not in printed


def test_checks_of_rust_run_where_it_is(tree: Tree) -> None:
    tree.rust(RUST)
    tree.make("test-native", CI="true")
    assert tree.calls.read_text(encoding="utf-8") == "cargo test --locked --quiet\n"
    tree.make("check-native", CI="true")
    ran = tree.calls.read_text(encoding="utf-8").splitlines()[2:]
    assert ran == ["cargo fmt --check", "cargo clippy --locked --quiet --all-targets -- -D warnings"]
    tree.rust(RUST, components="fmt")
    assert "native: cargo clippy is missing; for this" in tree.make("check-native", code=2, CI="true")[1]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/operate.md"])
def test_the_pages_name_the_rust_that_it_needs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"\[Rust\]\(https://rustup.rs\) (\d[\d.]*\d)", text) == [RUST]


# a fresh clone


def path_without_rust(directory: Path) -> str:
    """PATH with each folder that contains cargo replaced by a folder of links to its other programs."""
    folders = []
    for number, folder in enumerate(filter(None, os.environ["PATH"].split(":"))):
        if (Path(folder) / "cargo").exists():
            other = directory / str(number)
            other.mkdir(parents=True)
            for tool in Path(folder).iterdir():
                if tool.name not in {"cargo", "rustc"}:
                    (other / tool.name).symlink_to(tool)
            folders.append(str(other))
        else:
            folders.append(folder)
    return ":".join(folders)


@pytest.mark.partners
@pytest.mark.alone
@pytest.mark.timeout(700, func_only=True)
@pytest.mark.parametrize(("rust", "seconds"), [(True, 90), (False, 30)])
def test_make_run_of_a_fresh_clone(tmp_path: Path, rust: bool, seconds: int) -> None:
    """Build and start from a copy of the files; on an idle machine the broker accepts a connection in ``seconds``."""
    if rust:
        need()
    clone = copied(tmp_path / "clone")
    port, namesrv = broker_port(), free_port()
    environment = {
        **dict.fromkeys(("MAKEFLAGS", "ARGS", "TRIMQ_NATIVE"), ""),
        "NATIVE": "on",
        "PATH": os.environ["PATH"] if rust else path_without_rust(tmp_path / "path"),
        "PYTHON": sys._base_executable,  # type: ignore[attr-defined]
        "TRIMQ_LISTEN_PORT": str(port),
        "TRIMQ_FAST_LISTEN_PORT": "0",
        "TRIMQ_EMBEDDED_NAMESRV_PORT": str(namesrv),
    }
    made = Process("make-run", [partners.tool("make"), "-C", str(clone), "run"], tmp_path, environment)
    began = time.monotonic()
    with ended_afterwards(made):
        made.start()
        wait_until(lambda: probe.accepts(f"127.0.0.1:{port}"), "a connection is accepted", 300)
        took = time.monotonic() - began
        wait_until(lambda: "first message" in made.tail(), "the banner")
        banner = made.tail()
    assert ("runs           native " in banner) == rust
    assert (f"native: cargo is not in PATH: TriMQ works without it; for the native extension, {HOW}" in banner) != rust
    # Other processes' share of the processors prolongs the build; make itself runs about one process for each.
    others = max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert took < seconds * others, f"{took:.0f} s, load {others:.1f}\n{banner}"


@pytest.mark.partners
@pytest.mark.timeout(400, func_only=True)
def test_the_extension_by_hand(tmp_path: Path) -> None:
    """README: ``pip install ./native``."""
    need()
    assert "`pip install ./native`" in (ROOT / "README.md").read_text(encoding="utf-8")
    clone = copied(tmp_path / "clone")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=60)
    python = str(tmp_path / "venv/bin/python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "./native"]
    subprocess.run(pip, cwd=clone, check=True, timeout=300)
    code = "from trimq.protocol.native import NATIVE; print(NATIVE.status)"
    environment = {**os.environ, "PYTHONPATH": str(clone), "TRIMQ_NATIVE": ""}
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=30)
    assert re.fullmatch(r"native [\d.]+\n", done.stdout)
