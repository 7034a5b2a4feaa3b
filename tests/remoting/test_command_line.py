"""What the programs set for their whole process."""

import subprocess
import sys

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


def test_settled_memory_is_not_visited_again() -> None:
    run = subprocess.run([sys.executable, "-c", SETTLE], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "True True (50000, 25, 50)\n"
