"""Ways to break the broker, each of which the simulation has to notice: they show that its checks can fail."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

from tests.store.simdisk import SimDisk
from trimq.broker.store.durability.flush import GroupCommitService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.topic_queue import TopicQueue

_commit: Final = GroupCommitService.commit
_submit: Final = GroupCommitService.submit
_queue: Final = CommitLog.queue


def _acknowledge_before_the_sync(service: Any) -> None:
    for entry in service._pending:
        if entry.on_done is not None:
            on_done, entry.on_done = entry.on_done, None
            on_done(entry.result)
    _commit(service)


def _dispatch_at_once(service: Any, put: Any, result: Any, on_done: Any) -> Any:
    found = _submit(service, put, result, on_done)
    service._dispatch(put, result)
    return found


def _queue_from_zero(log: Any, topic: str, queue_id: int) -> TopicQueue:
    known = (topic, queue_id) in log.queues
    queue = _queue(log, topic, queue_id)
    if not known:
        queue.next_offset = 0
    return queue


def _patched(owner: type, name: str, function: Callable[..., Any]) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(owner, name, function)


BREAKS: Final[dict[str, Callable[[], AbstractContextManager[object]]]] = {
    "acknowledged-before-synced": _patched(GroupCommitService, "commit", _acknowledge_before_the_sync),
    "readable-before-synced": _patched(GroupCommitService, "submit", _dispatch_at_once),
    "sync-does-nothing": _patched(SimDisk, "data_sync", lambda *_: None),
    "queues-start-at-zero": _patched(CommitLog, "queue", _queue_from_zero),
}
"""Patches by name."""
