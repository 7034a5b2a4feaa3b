"""Rebuilds queues and index of a store from its log: the recovery of a start after a kill, without a checkpoint."""

import shutil
from pathlib import Path

import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.message_store import MessageStore, StoreInUseError, StoreLoadError
from trimq.broker.store.recovery.recovery import RecoveryReport
from trimq.broker.tools.dump import Progress
from trimq.broker.tools.offline_store import NotUsableError, locked
from trimq.protocol.file_names import parse_offset_name

_POLL = 0.05


def rebuild(config: MessageStoreConfig, progress: Progress) -> RecoveryReport:
    """Delete index and checkpoint, compare every queue unit with the log, and rewrite those that are wrong or missing.

    Queues whose records have all been deleted from the log keep their offsets. Raises NotUsableError.
    """
    root = Path(config.root)
    # The store takes the lock itself when it is opened, so it is released in between. A broker that starts in that
    # moment finds no checkpoint and does the same recovery.
    with locked(root):
        if not any(parse_offset_name(path.name) is not None for path in config.commit_log_path.glob("[0-9]*")):
            raise NotUsableError(f"{config.commit_log_path} holds no log file: there is nothing to rebuild from")
        # The checkpoint goes before the index: without it a start trusts nothing, so a kill in between does no harm.
        try:
            for name in ("checkpoint", "consumequeue.snapshot"):
                (root / name).unlink(missing_ok=True)
        except OSError as error:
            raise NotUsableError(str(error)) from error
        shutil.rmtree(root / "index", ignore_errors=True)
    try:
        return trio.run(_run, config, progress)
    except* (StoreInUseError, StoreLoadError, OSError) as group:
        raise NotUsableError("; ".join(str(error) for error in _flatten(group))) from group


def _flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group, including those of nested groups."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


async def _run(config: MessageStoreConfig, progress: Progress) -> RecoveryReport:
    store = MessageStore(config)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, store, progress)
        async with store.opened():
            pass
        nursery.cancel_scope.cancel()
    report = store.recovered
    assert report is not None
    return report


async def _watch(store: MessageStore, progress: Progress) -> None:
    while True:
        if store.recovering is not None:
            progress(store.recovering.bytes_done)
        await trio.sleep(_POLL)
