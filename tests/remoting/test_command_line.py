"""What the programs set for their whole process."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimq.remoting.config import malloc

SETTLE = """
import gc
from trimq.remoting.config.command_line import settle_memory
class Cycle: pass
cycle = Cycle(); cycle.itself = cycle
del cycle
settle_memory()
assert not [found for found in gc.get_objects() if isinstance(found, Cycle)]
first = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
settle_memory()
print(first > 1000, gc.get_freeze_count() - first > 900, gc.get_threshold())
"""
ARENAS = """
import ctypes, os, tempfile, threading
from trimq.remoting.config.command_line import prepare_process
prepare_process()
def allocate():
    kept.append([bytes(100_000) for _ in range(100)])
    ready.wait()
kept, ready = [], threading.Barrier(5)
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
ready.wait()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(library.fopen(os.environ["REPORT"].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
print(open(os.environ["REPORT"]).read().count("<heap "))
"""
TRIM = """
from pathlib import Path
from trimq.remoting.config.command_line import prepare_process
from trimq.remoting.config.malloc import give_back_memory
prepare_process()
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
bytearray(24 << 20)  # from now on malloc takes no piece of less from the system alone
kept = [bytearray(1 << 20) for _ in range(64)]
del kept[:-1]
before = resident()
give_back_memory()
print(before - resident() >= 60)
"""


def run_with(script: str, environment: dict[str, str]) -> str:
    base = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=base | environment
    )
    return run.stdout


def test_threads_share_one_arena_of_malloc(tmp_path: Path) -> None:
    report = {"REPORT": str(tmp_path / "arenas.xml")}
    assert run_with(ARENAS, report) == "1\n"
    assert run_with(ARENAS, report | {"MALLOC_ARENA_MAX": "3"}) == "3\n"


def test_memory_is_given_back() -> None:
    assert run_with(TRIM, {}) == "True\n"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    malloc.use_one_arena()
    malloc.give_back_memory()


def test_settled_memory_is_not_visited_again() -> None:
    run = subprocess.run([sys.executable, "-c", SETTLE], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "True True (50000, 25, 50)\n"
