"""Makes an empty directory the store of a broker whose history is in a bucket, as a start with that directory would.

The command lets an operator see what came back, and what did not, before a broker takes the bucket.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio
from msgspec import Struct

from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.disk.store_lock import LOCK_FILE
from trimq.broker.store.tiered.bucket.bucket import GET
from trimq.broker.store.tiered.bucket.queue_starts import RESTORED
from trimq.broker.store.tiered.bucket.restore import is_empty, restore
from trimq.broker.tools.command_parts import Progress
from trimq.broker.tools.offline_bucket import OfflineBucket
from trimq.broker.tools.offline_store import NotUsableError, locked
from trimq.protocol.bucket_state import STATE_FILES

_POLL: Final = 0.1
NOT_RESTORED: Final = (
    "delayed and timed messages that were not due, half messages of transactions, and all other messages of system "
    "topics: these stay on the disk of the broker"
)


class RestoredLine(Struct, rename="camel"):
    """A queue: where its messages in the bucket begin and end, and the offset of its next message.

    ``missing``: messages that consumers had got and that are not in the bucket.
    """

    topic: str
    queue_id: int
    begin: int
    end: int
    start: int
    missing: int


class RestoreReport(Struct, rename="camel"):
    """What was restored. ``may_be_missing``, ``not_restored``: in words."""

    bucket: str
    store: str
    log_start: int
    files: list[str]
    queues: list[RestoredLine]
    may_be_missing: str
    not_restored: str = NOT_RESTORED


def restore_store(found: OfflineBucket, root: Path, progress: Progress) -> RestoreReport:
    """Restore into a directory. ``progress``: called with the bytes that were read.

    Raises NotUsableError if it is not empty or a broker has it open; OSError; BucketFormatError.
    """
    if root.exists() and not root.is_dir():
        raise NotUsableError(f"{root} is no directory")
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        _check_empty(found, root)
        return trio.run(_run, found, root, progress)


def _check_empty(found: OfflineBucket, root: Path) -> None:
    """What a restore that was interrupted has left is no obstacle: it is written again."""
    ours = {root / LOCK_FILE, *(root / "config" / name for name in STATE_FILES), root / RESTORED}
    others = sorted(path for path in root.rglob("*") if path.is_file() and path not in ours)
    # A power cut may have left the log's file without its length: see is_empty.
    others = [path for path in others if path.parent != found.local.commit_log_path or path.stat().st_size]
    # An empty log file has the right name already, so it comes last: with one the restore was complete.
    if others or not is_empty(RealDisk(), found.local):
        shown = others[0] if others else found.local.commit_log_path
        raise NotUsableError(
            f"{root} is not empty: {shown} is there. A store is restored into an empty directory; move this one away"
        )


async def _run(found: OfflineBucket, root: Path, progress: Progress) -> RestoreReport:
    disk = RealDisk().with_own_threads()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, found, progress)
        manifest, _ = await found.load()
        restored = await restore(disk, found.local, found.bucket, manifest)
        nursery.cancel_scope.cancel()
    timeout = found.tier.tiered_store_group_commit_timeout
    lines = [RestoredLine(*queue, queue.missing) for queue in restored.queues]
    may_be_missing = (
        f"messages that were sent after the last upload: those of tieredStoreGroupCommitTimeout ({timeout} ms), or of "
        "the time since uploads had failed"
    )
    return RestoreReport(found.url, str(root), restored.log_start, restored.files, lines, may_be_missing)


async def _watch(found: OfflineBucket, progress: Progress) -> None:
    while True:
        progress(int(found.bucket.calls[GET].sizes.total))
        await trio.sleep(_POLL)


def restore_lines(report: RestoreReport) -> Iterator[str]:
    """The same for people."""
    yield f"bucket      {report.bucket}"
    yield f"store       {report.store}"
    yield f"log         goes on at offset {report.log_start}"
    yield f"state       {', '.join(report.files) or 'none: topics and groups have to be created again'}"
    yield f"{'topic':32} {'queue':>5} {'first':>12} {'end':>12} {'goes on at':>12}  missing"
    for queue in report.queues:
        missing = f"at least {queue.missing}" if queue.missing else "-"
        yield (f"{queue.topic:32} {queue.queue_id:5} {queue.begin:12} {queue.end:12} {queue.start:12}  {missing}")
    yield f"may be missing  {report.may_be_missing}"
    yield f"not restored    {report.not_restored}"
    yield "the store is restored: start the broker on it, and no other one of its name"
