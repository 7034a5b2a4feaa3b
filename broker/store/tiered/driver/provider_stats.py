"""What was asked of the provider: durations of its calls and bytes, by kind of file. For metrics only."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from trimq.remoting.runtime.durations import Durations

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
LATENCIES: Final = (0.001, 0.003, 0.005, 0.007, 0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 3.0)
"""Upper ends of buckets in seconds, those of RocketMQ's TieredStoreMetricsManager."""
SIZES: Final = (_KIB, 10 * _KIB, 100 * _KIB, _MIB, 10 * _MIB, 32 * _MIB, 50 * _MIB, 100 * _MIB)
"""The same for sizes in bytes."""


class CallStats:
    """Calls of one operation on one kind of file. ``succeeded`` and ``failed`` in seconds, ``sizes`` in bytes."""

    __slots__ = ("failed", "sizes", "succeeded")

    def __init__(self) -> None:
        self.succeeded = Durations(LATENCIES)
        self.failed = Durations(LATENCIES)
        self.sizes = Durations(SIZES)

    @contextmanager
    def measured(self, size: int) -> Iterator[None]:
        """Count the call that is made meanwhile, for ``size`` bytes. A call that is cancelled does not count."""
        began = time.perf_counter()
        try:
            yield
        except OSError:
            self.failed.add(time.perf_counter() - began)
            raise
        self.succeeded.add(time.perf_counter() - began)
        self.sizes.add(size)


class FileStats:
    """Calls on one kind of file."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads = CallStats()
        self.writes = CallStats()


class ProviderStats:
    """All calls. A kind is the name of a SegmentType in lower case, or ``PHYSICAL_KIND``."""

    def __init__(self) -> None:
        self.kinds: dict[str, FileStats] = {}

    def of(self, kind: str) -> FileStats:
        """The calls on files of a kind."""
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = FileStats()
        return found


PHYSICAL_KIND: Final = "physical_offset"
"""The kind of the side files."""
