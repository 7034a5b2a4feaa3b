"""Queues and index of a store from its log: the recovery that a start after a kill does, with nothing trusted."""

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
    """Delete index and checkpoint, compare every queue unit with the log and write those that are wrong or missing.

    Queues that the log has no record of any more keep their offsets. Raises NotUsableError.
    """
    root = Path(config.root)
    with locked(root):
        if not any(parse_offset_name(path.name) is not None for path in config.commit_log_path.glob("[0-9]*")):
            raise NotUsableError(f"{config.commit_log_path} holds no log file: there is nothing to rebuild from")
        try:
            for name in ("checkpoint", "consumequeue.snapshot"):
                (root / name).unlink(missing_ok=True)
        except OSError as error:
            raise NotUsableError(str(error)) from error
        shutil.rmtree(root / "index", ignore_errors=True)
    try:
        return trio.run(_run, config, progress)
    except* (StoreInUseError, StoreLoadError, OSError) as group:
        raise NotUsableError("; ".join(str(error) for error in _leaves(group))) from group


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
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
