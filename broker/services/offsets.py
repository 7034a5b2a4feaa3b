"""The offset of each group in each queue: consumerOffset.json (RocketMQ's ConsumerOffsetManager)."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.state_file import (
    PersistentTable,
    StateFile,
    StateFileError,
    encode_pieces,
    load_data_version,
    unknown_fields,
)
from trimq.broker.store.disk.disk import Disk
from trimq.protocol.body import DataVersion
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC, is_system_topic
from trimq.protocol.transaction import GROUP
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.offsets")

SEPARATOR: Final = "@"
NOT_FOUND: Final = -1

_KNOWN: Final = frozenset({"dataVersion", "groupTopicMap", "offsetTable", "pullOffsetTable", "resetOffsetTable"})

Table = dict[str, dict[int, int]]

_OWN: Final = tuple(f"{topic}{SEPARATOR}{GROUP}" for topic in (TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC))
"""Offsets in the broker's own queues say what is done, not what was read."""


def is_of_broker(group: str) -> bool:
    """Whether only the broker sets the offsets of a group: no request does."""
    return group == GROUP


class ConsumerOffsetManager(PersistentTable):
    """Offsets by ``topic@group`` and queue.

    Commits change memory only and are written to disk every flushConsumerOffsetInterval: after a kill, a group gets the
    messages of its last seconds again. A reset requested by an administrator stays in its own table until the next pull
    of that queue takes it (code OFFSET_MOVED). Until then commits of running consumers are ignored, because they would
    undo it. Pending resets are written to disk too.
    """

    def __init__(self, configuration: Configuration, disk: Disk, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._commits = 0
        self.refused = 0
        """Number of refused commits."""
        self._next_version = configuration.section(BrokerConfig).consumer_offset_update_version_step
        self._rest: dict[str, Any] = {}
        self._topics_of: dict[str, set[str]] = {}
        self._groups_of: dict[str, set[str]] = {}
        self.offset_table: Table = {}
        self.pull_offset_table: Table = {}
        self.reset_offset_table: Table = {}
        self._own: Table = {}
        self.data_version = DataVersion()
        path = configuration.section(MessageStoreConfig).config_path / "consumerOffset.json"
        self._file = StateFile(disk, str(path), self.pieces, self._interval)
        self._changed = self._file.changed

    # state file

    async def load(self) -> None:
        """Read consumerOffset.json. Raises StateFileError."""
        state = await self._file.load()
        if state is None:
            return
        where = self._file.path
        self.offset_table = _load_table(state.get("offsetTable"), where)
        self.pull_offset_table = _load_table(state.get("pullOffsetTable"), where)
        self.reset_offset_table = _load_table(state.get("resetOffsetTable"), where)
        self.data_version = load_data_version(state.get("dataVersion"), where)
        self._rest = unknown_fields(state, _KNOWN)
        for key in self.offset_table:
            self._index(key)

    def follow(self, state: dict[str, Any]) -> Table:
        """Take the offsets of a slave's master; those that it lacks stay. Raises StateFileError.

        Returns those of the broker's own groups, for ``follow_own``.
        """
        where = "the master's offsets"
        offsets = _load_table(state.get("offsetTable"), where)
        own = {key: offsets.pop(key) for key in _OWN if key in offsets}
        pulls = _load_table(state.get("pullOffsetTable"), where)
        resets = _load_table(state.get("resetOffsetTable"), where)
        version = load_data_version(state.get("dataVersion"), where)
        if 0 < version.state_version < self.data_version.state_version:
            # 0: Apache's broker does not say it everywhere.
            own_epoch = self.data_version.state_version
            raise StateFileError(f"{where} are of epoch {version.state_version}, these of {own_epoch}")
        if all(self.offset_table.get(key) == value for key, value in offsets.items()) and (
            pulls == self.pull_offset_table and resets == self.reset_offset_table
        ):
            return own
        for key, value in offsets.items():
            self.offset_table.setdefault(key, {}).update(value)
            self._index(key)
        self.pull_offset_table = pulls
        self.reset_offset_table = resets
        self.data_version = version
        self._changed()
        return own

    def begin_epoch(self, epoch: int) -> None:
        """This broker is the master of an epoch now: its offsets are newer than those of any master before."""
        if self.data_version.state_version != epoch:
            self.data_version = self.data_version.led(epoch, self._clock.wall_ms())
            self._changed()

    def follow_own(self, own: Table) -> None:
        """Take the offsets of the own groups of a slave's master, when the log has what was done up to them."""
        for key, value in own.items():
            if self.offset_table.get(key) != value:
                self.offset_table.setdefault(key, {}).update(value)
                self._index(key)
                self._changed()

    def cap(self, ends: Callable[[str, int], int | None]) -> None:
        """Lower offsets that are above the end of their queue to it.

        ``ends`` returns a queue's end, None for one that does not exist. What a power cut or a failover took from the
        log will be sent again, and would be passed over. Offsets in the broker's own queues are the business of the
        services that read them.
        """
        for key, offsets in self.offset_table.items():
            topic, _, group = key.partition("@")
            if is_system_topic(topic):
                continue
            for queue_id, offset in offsets.items():
                end = ends(topic, queue_id)
                if end is not None and offset > end:
                    _log.warning("offset_capped", group=group, topic=topic, queue=queue_id, before=offset, now=end)
                    offsets[queue_id] = end
                    self._changed()

    def pieces(self) -> Iterator[bytes]:
        """The content of consumerOffset.json; also the body of GET_ALL_CONSUMER_OFFSET (43)."""
        table = self.offset_table
        # The broker's own offsets are copied: two that were committed together must not be written from two moments,
        # while the commits of clients may change between the pieces.
        if self._own:
            table = table | {key: dict(offsets) for key, offsets in self._own.items() if offsets or key in table}
        state: dict[str, Any] = {"dataVersion": self.data_version, "offsetTable": table}
        if self.pull_offset_table:
            state["pullOffsetTable"] = self.pull_offset_table
        if self.reset_offset_table:
            state["resetOffsetTable"] = self.reset_offset_table
        return encode_pieces(state | self._rest)

    def _interval(self) -> float:
        return self._configuration.section(BrokerConfig).flush_consumer_offset_interval / 1000

    # the hot path

    def commit(self, client: str, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Set a group's offset, also to a smaller one. False if it was ignored because a reset is pending.

        ``client`` is for the log. The caller has checked queue and offset, and called ``check_group``.
        """
        key = f"{topic}@{group}"
        if self.reset_offset_table:
            waiting = self.reset_offset_table.get(key)
            if waiting is not None and queue_id in waiting:
                return False
        offsets = self.offset_table.get(key)
        if offsets is None:
            offsets = self.offset_table[key] = {}
            self._index(key)
        before = offsets.get(queue_id)
        offsets[queue_id] = offset
        if before is not None and offset < before:
            _log.info(
                "offset_went_back", group=group, topic=topic, queue=queue_id, before=before, now=offset, client=client
            )
        self._commits += 1
        if self._commits >= self._next_version:
            self._next_version += self._configuration.section(BrokerConfig).consumer_offset_update_version_step
            self.data_version = self.data_version.next(self._clock.wall_ms())
        self._changed()
        return True

    def check_group(self, group: str) -> None:
        """Check a group whose offsets a request sets: commits, also with pulls, resets and copies.

        Raises NO_PERMISSION if only the broker sets them, SYSTEM_BUSY if ``group`` has no offsets yet and
        maxOffsetGroups groups have some.
        """
        if is_of_broker(group):
            raise RemotingError(
                ResponseCode.NO_PERMISSION,
                f"the offsets of {group} say which half messages are ended: only the broker sets them",
            )
        if group not in self._topics_of:
            most = self._configuration.section(BrokerConfig).max_offset_groups
            if len(self._topics_of) >= most:
                raise RemotingError(
                    ResponseCode.SYSTEM_BUSY,
                    f"{len(self._topics_of)} consumer groups have offsets on this broker and {most} may"
                    f" (maxOffsetGroups): offsets of {group} are not stored",
                )

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """A group's offset, or its pending reset; -1 if there is neither."""
        key = f"{topic}@{group}"
        if self.reset_offset_table:
            waiting = self.reset_offset_table.get(key)
            if waiting is not None and queue_id in waiting:
                return waiting[queue_id]
        offsets = self.offset_table.get(key)
        return NOT_FOUND if offsets is None else offsets.get(queue_id, NOT_FOUND)

    def commit_pull(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Record the offset of a group's next pull (the ``pullOffset`` of statistics)."""
        key = f"{topic}@{group}"
        offsets = self.pull_offset_table.get(key)
        if offsets is None:
            offsets = self.pull_offset_table[key] = {}
        offsets[queue_id] = offset
        self._changed()

    def query_pull(self, group: str, topic: str, queue_id: int) -> int:
        """The offset after a group's last pull; the committed offset if that is not known."""
        offsets = self.pull_offset_table.get(f"{topic}@{group}")
        if offsets is None or queue_id not in offsets:
            return self.query(group, topic, queue_id)
        return offsets[queue_id]

    def has_reset(self, topic: str, group: str, queue_id: int) -> bool:
        """Whether a reset is pending."""
        return bool(self.reset_offset_table) and queue_id in self.reset_offset_table.get(f"{topic}@{group}", ())

    def take_reset(self, topic: str, group: str, queue_id: int) -> int | None:
        """Take the pending reset of a queue, if there is one: it is returned only once."""
        if not self.reset_offset_table:
            return None
        key = f"{topic}@{group}"
        waiting = self.reset_offset_table.get(key)
        if waiting is None:
            return None
        offset = waiting.pop(queue_id, None)
        if not waiting:
            del self.reset_offset_table[key]
        if offset is not None:
            self._file.changed()
        return offset

    # groups of the broker itself

    def own_offset(self, group: str, topic: str, queue_id: int) -> int:
        """The stored offset of a group of the broker itself, whatever is to be reset; -1 if there is none.

        From now on only ``commit_own`` changes it on disk, and no client does.
        """
        key = f"{topic}@{group}"
        own = self._own.setdefault(key, dict(self.offset_table.get(key, {})))
        return own.get(queue_id, NOT_FOUND)

    def commit_own(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the offset of a group of the broker itself."""
        key = f"{topic}@{group}"
        own = self._own.setdefault(key, {})
        if own.get(queue_id) != offset or self.offset_table.get(key, {}).get(queue_id) != offset:
            own[queue_id] = offset
            self._set(key, queue_id, offset)

    # administration

    def query_all(self, group: str, topic: str) -> dict[int, int] | None:
        """All offsets of a group in a topic; None if it never committed there."""
        return self.offset_table.get(f"{topic}@{group}")

    def topics_of(self, group: str) -> set[str]:
        """The topics in which a group has offsets."""
        return set(self._topics_of.get(group, ()))

    def groups_of(self, topic: str) -> set[str]:
        """The groups that have offsets in a topic."""
        return set(self._groups_of.get(topic, ()))

    def assign_reset(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Set an offset that running consumers adopt at their next pull.

        The caller has called ``check_group``, and replies after ``persisted()``.
        """
        key = f"{topic}@{group}"
        self.reset_offset_table.setdefault(key, {})[queue_id] = offset
        self._set(key, queue_id, offset)
        _log.info("offset_reset", group=group, topic=topic, queue=queue_id, offset=offset)

    def clone(self, source: str, target: str, topic: str | None = None) -> int:
        """Copy the offsets of ``source`` to ``target``, in one topic or in all. Returns the number of topics.

        The caller has called ``check_group`` for ``target``.
        """
        topics = self.topics_of(source) if topic is None else {topic}
        done = 0
        for name in topics:
            offsets = self.query_all(source, name)
            if offsets is not None:
                key = f"{name}@{target}"
                self.offset_table[key] = dict(offsets)
                self._index(key)
                self._file.changed()
                done += 1
        return done

    def of_others(self, topic: str, without_groups: frozenset[str]) -> Iterator[tuple[int, int]]:
        """Queues and offsets of all groups in a topic except some (308). They may change during the iteration."""
        for group in self._groups_of.get(topic, set()) - without_groups:
            yield from list(self.offset_table.get(f"{topic}@{group}", {}).items())

    def remove_group(self, group: str) -> None:
        """Remove a group's offsets and pending resets."""
        for topic in self.topics_of(group):
            self._remove(topic, group)
        self._remove_leftovers(lambda _, owner: owner == group)

    def remove_pulls(self, group: str) -> None:
        """Remove the pull offsets of a deleted group. Its committed offsets may stay for a new group of that name."""
        for key in [key for key in self.pull_offset_table if key.partition(SEPARATOR)[2] == group]:
            del self.pull_offset_table[key]
            self._file.changed()

    def remove_topic(self, topic: str) -> None:
        """Remove all offsets in a topic."""
        for group in self.groups_of(topic):
            self._remove(topic, group)
        self._remove_leftovers(lambda name, _: name == topic)

    def _set(self, key: str, queue_id: int, offset: int) -> None:
        if key not in self.offset_table:
            self.offset_table[key] = {}
            self._index(key)
        self.offset_table[key][queue_id] = offset
        self._file.changed()

    def _index(self, key: str) -> None:
        topic, separator, group = key.partition(SEPARATOR)
        if separator and SEPARATOR not in group:
            self._topics_of.setdefault(group, set()).add(topic)
            self._groups_of.setdefault(topic, set()).add(group)

    def _remove(self, topic: str, group: str) -> None:
        self.offset_table.pop(f"{topic}@{group}", None)
        for index, name, other in ((self._topics_of, group, topic), (self._groups_of, topic, group)):
            index[name].discard(other)
            if not index[name]:
                del index[name]
        self._file.changed()

    def _remove_leftovers(self, matches: Callable[[str, str], bool]) -> None:
        for table in (self.pull_offset_table, self.reset_offset_table):
            for key in [key for key in table if matches(*key.partition(SEPARATOR)[::2])]:
                del table[key]
                self._file.changed()


def _load_table(raw: Any, where: str) -> Table:
    try:
        return {
            key: {int(queue): int(offset) for queue, offset in offsets.items()} for key, offsets in (raw or {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise StateFileError(f"{where}: an offset is not a number: {error}") from None
