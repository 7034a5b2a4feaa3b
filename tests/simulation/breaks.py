"""Ways to break the broker, each of which the simulation has to notice: they show that its checks can fail."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import msgspec

from tests.store.simdisk import SimDisk
from trimq.broker.replicas.replica import Replica
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.slave_synchronize import SlaveSynchronize
from trimq.broker.store.durability.flush import GroupCommitService
from trimq.broker.store.durability.group_transfer import GroupTransferService
from trimq.broker.store.durability.pending_puts import PendingPuts
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.log_scan import RecordReader
from trimq.broker.store.log.topic_queue import TopicQueue
from trimq.broker.store.replication.auto_switch_client import AutoSwitchHAClient
from trimq.broker.store.replication.auto_switch_service import AutoSwitchHAService
from trimq.broker.store.replication.follower import StoreFollower
from trimq.broker.store.replication.ha_connection import HAConnection
from trimq.broker.store.replication.leadership import Leadership
from trimq.broker.store.replication.slave_log import SlaveLog
from trimq.broker.store.timer.timer_store import TimerStore
from trimq.controller.group_state import GroupState
from trimq.controller.replicas_info import ReplicasInfoManager
from trimq.protocol.topic_rules import SCHEDULE_TOPIC
from trimq.remoting.auth.auth_store import AuthStore

_complete: Final = GroupTransferService._complete
_commit: Final = GroupCommitService.commit
_submit: Final = PendingPuts.submit
_reported: Final = HAConnection._reported
_slave_log: Final = SlaveLog.__init__
_queue: Final = CommitLog.queue
_follow: Final = TimerStore.follow
_want: Final = Leadership.want
_candidates: Final = ReplicasInfoManager._candidates
_follow_delays: Final = ScheduleMessageService.follow


def _acknowledge_before_the_sync(service: Any) -> None:
    for entry in service._pending._pending:
        if entry.on_done is not None:
            on_done, entry.on_done = entry.on_done, None
            on_done(entry.result)
    _commit(service)


def _dispatch_at_once(pending: Any, put: Any, result: Any, on_done: Any) -> Any:
    found = _submit(pending, put, result, on_done)
    pending._dispatch(put, result)
    return found


def _resume_at_the_last_file(connection: Any, offset: int) -> None:
    first = not connection._first.is_set()
    _reported(connection, offset)
    if first:
        connection.sent_offset = connection._master.log.files.last_start


def _reader_without_crc(log: Any, path: Any) -> None:
    _slave_log(log, path)
    log._reader = RecordReader(path.log.files.size, check_crc=False)


async def _no_sync(_follower: Any) -> bool:
    return True


def _appended(follower: Any) -> int:
    return int(follower._path.log.max_offset)


def _stored(service: Any) -> int:
    return int(service._stored_offset)


def _queue_from_zero(log: Any, topic: str, queue_id: int) -> TopicQueue:
    known = (topic, queue_id) in log.queues
    queue = _queue(log, topic, queue_id)
    if not known:
        queue.next_offset = 0
    return queue


def _answer_what_is_stored(service: Any) -> None:
    for entry in service._pending._pending:
        if entry.on_done is not None and entry.end <= service._stored_offset:
            on_done, entry.on_done = entry.on_done, None
            on_done(entry.result)
    _complete(service)


async def _follow_from_the_checkpoint(timers: Any, handover: Any, _begin: int) -> None:
    await _follow(timers, handover, handover.checkpoint.queue_offset)


def _nothing_is_delayed(schedule: Any, state: Any) -> None:
    ends = {level: schedule._store.max_offset(SCHEDULE_TOPIC, level - 1) for level in schedule.offsets()}
    _follow_delays(schedule, state | {"offsetTable": ends})


def _covered_without_lease(service: Any) -> int:
    service.replicated_offset = max(service.replicated_offset, service._covered())
    return int(service.replicated_offset)


def _members_alone(service: Any) -> frozenset[int]:
    return frozenset(service.leadership.members)


def _change_the_set_at_once(leadership: Any, members: frozenset[int]) -> None:
    _want(leadership, members)
    leadership.members = members


async def _no_comparison(*_: Any) -> None:
    pass


def _all_are_members(manager: Any, state: GroupState, broker_id: int, **options: Any) -> set[int]:
    if state.set is not None:
        state.set = msgspec.structs.replace(state.set, ids=sorted(state.ids))
    return _candidates(manager, state, broker_id, **options)


async def _adopt_in_memory(store: Any, data: bytes) -> None:
    store.follow(store.read_of(data, store._secrets))


async def _no_users(*_: Any) -> None:
    pass


@contextmanager
def _both(*patches: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _patched(owner: type, name: str, function: Any) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(owner, name, function)


BREAKS: Final[dict[str, Callable[[], AbstractContextManager[object]]]] = {
    "acknowledged-before-synced": _patched(GroupCommitService, "commit", _acknowledge_before_the_sync),
    "readable-before-synced": _patched(PendingPuts, "submit", _dispatch_at_once),
    "sync-does-nothing": _patched(SimDisk, "data_sync", lambda *_: None),
    "acknowledged-before-replicated": _patched(GroupTransferService, "_complete", _answer_what_is_stored),
    "readable-before-replicated": _patched(GroupTransferService, "readable_offset", property(_stored)),
    "slave-acknowledges-before-synced": lambda: _both(
        mock.patch.object(StoreFollower, "make_acknowledgeable", _no_sync),
        mock.patch.object(StoreFollower, "acknowledged_offset", property(_appended)),
    ),
    "slave-checks-no-crc": _patched(SlaveLog, "__init__", _reader_without_crc),
    "resumes-at-the-last-file": _patched(HAConnection, "_reported", _resume_at_the_last_file),
    "slave-forgets-pending-timers": _patched(TimerStore, "follow", _follow_from_the_checkpoint),
    "slave-takes-delay-offsets-of-all": _patched(ScheduleMessageService, "follow", _nothing_is_delayed),
    "acknowledged-without-lease": _patched(AutoSwitchHAService, "confirmed_offset", property(_covered_without_lease)),
    "joining-slave-is-not-waited-for": _patched(AutoSwitchHAService, "_awaited", _members_alone),
    "set-changes-before-the-controllers-know": _patched(Leadership, "want", _change_the_set_at_once),
    "slave-does-not-truncate": _patched(Replica, "_truncate", lambda *_: None),
    "slave-compares-no-epochs": _patched(AutoSwitchHAClient, "_compare", _no_comparison),
    "elects-any-broker": _patched(ReplicasInfoManager, "_candidates", _all_are_members),
    "users-are-not-followed": _patched(SlaveSynchronize, "_follow_users", _no_users),
    "users-are-followed-in-memory": _patched(AuthStore, "adopt", _adopt_in_memory),
    "queues-start-at-zero": _patched(CommitLog, "queue", _queue_from_zero),
}
"""Patches by name."""
