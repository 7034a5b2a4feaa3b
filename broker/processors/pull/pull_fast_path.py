"""The fast path of a pull: from its header, decoded in one pass, to the bytes of its reply.

It serves pulls of a known group and topic that have a JSON header and find messages in memory. All others (nothing new,
cold data, a reset, a refusal) are left to pull.py before there are side effects. The full path gets the same decoded
header and knows every case.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from trimq.broker.filters.tag import ALL, TAG
from trimq.broker.processors.pull.pull_reply import found_template
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.offsets import ConsumerOffsetManager, is_of_broker
from trimq.broker.services.stats import BrokerStats, StatsItem
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import ConsumeQueue, MessageStore
from trimq.broker.store.types import MessageFilter
from trimq.protocol.body import PERM_READ, SubscriptionGroupConfig, TopicConfig
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.protocol.queue_unit import MAX_OFFSET
from trimq.protocol.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import FastHandler

COPIED: Final = 64 * 1024
"""Up to this size a reply is one buffer: a copy costs less than views, their owner and an I/O vector for the kernel."""
_MAX_READERS: Final = 10_000
_MAX_BYTES: Final = 128 * 1024 * 1024
_pack_words: Final = struct.Struct(">II").pack


class _Reader:
    """A group's view of a topic, cached for its pulls. Valid while both configurations are those in their tables."""

    __slots__ = ("group", "key", "nums", "queues", "sizes", "template", "topic")

    def __init__(self, group: SubscriptionGroupConfig, topic: TopicConfig, nums: StatsItem, sizes: StatsItem) -> None:
        self.group = group
        self.topic = topic
        self.key = f"{topic.topic_name}@{group.group_name}"
        self.queues: dict[int, ConsumeQueue] = {}
        self.nums = nums
        self.sizes = sizes
        self.template = found_template(topic.topic_sys_flag, group.group_sys_flag)


_Place = tuple[ConsumeQueue, int, int, int]
"""The request of a pull without a filter: queue, offset, most messages, most bytes."""


class PullFastPath:
    """Serves pulls that find messages in memory.

    A consumer that works through a backlog requests the next messages as soon as it has these. If the loop is idle
    until then, ``prepare`` reads them ahead.
    """

    def __init__(
        self,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        stats: BrokerStats,
        store: MessageStore,
        filter_of: Callable[[PullMessageRequestHeader], MessageFilter | None],
    ) -> None:
        """``filter_of`` returns the filter of a pull, or raises RemotingError."""
        self._filter_of = filter_of
        self._groups = groups.table
        self._topics = topics.table
        self._offsets = offsets
        self._stats = stats
        self._find_in_store = store.find_queue
        self._in_memory = store.get_in_memory
        self._ahead = store.get_ahead
        self._count_found = store.count_found
        self._low_offset = store.low_offset
        self._expected: _Place | None = None
        self._prepared: tuple[_Place, bytes, int, int] | None = None
        """What ``prepare`` has read: the pull it is for, the records, their number, the offset after them."""
        self._readers: dict[tuple[str, str], _Reader] = {}
        self.serve: FastHandler = self._handler()
        """For both request codes of pulls."""

    def _handler(self) -> FastHandler:  # noqa: PLR0915 - as below: the body of ``serve`` counts here too
        readers, groups, topics = self._readers, self._groups, self._topics
        offsets, filter_of, in_memory = self._offsets, self._filter_of, self._in_memory
        commit_pull, count_found, ahead = offsets.commit_pull, self._count_found, self._ahead
        broker_get, low_offset = self._stats.broker_get, self._low_offset

        def serve(  # noqa: PLR0912 - every pull passes here: each further call costs all of them
            connection: Connection, request: TypedRequest[Any]
        ) -> bytes | None:
            # ``return None`` leaves the request to the full path, which serves it from the start: no side effects yet.
            header = request.header
            group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
            reader = readers.get((group, topic))
            # A changed configuration is a new object in its table, so identity shows that the checks of _find hold.
            if reader is None or reader.topic is not topics.get(topic) or reader.group is not groups.get(group):
                reader = self._find(group, topic)
                if reader is None:
                    return None
            queue = reader.queues.get(queue_id)
            if queue is None or queue.deleted:
                queue = self._find_queue(reader, queue_id)
                if queue is None:
                    return None
            offset, sys_flag = header.queue_offset, header.sys_flag
            # One-way pulls, pending resets, offsets without a message, and commits that need a check. A group that has
            # offsets in the topic counts towards maxOffsetGroups already, so its commit cannot exceed the limit.
            if (
                request.flag
                or (offsets.reset_offset_table and reader.key in offsets.reset_offset_table)
                or not queue.min_offset <= offset < queue.next_offset
                or (
                    sys_flag & PULL_COMMIT_OFFSET
                    and (reader.key not in offsets.offset_table or not -1 <= header.commit_offset <= MAX_OFFSET)
                )
            ):
                return None
            if sys_flag & PULL_SUBSCRIPTION and header.subscription == ALL and header.expression_type == TAG:
                accept = None
            else:
                try:
                    accept = filter_of(header)
                except RemotingError:
                    return None
            requested = header.max_msg_bytes
            limit = requested if requested and 0 < requested < _MAX_BYTES else _MAX_BYTES
            nums = header.max_msg_nums
            prepared = self._prepared
            if prepared is not None and accept is None and prepared[0] == (queue, offset, nums, limit):
                # From here on the pull is served in any case, so taking the prepared records is no early side effect.
                self._prepared = None
                _, body, count, following = prepared
                buffers: list[bytes] | list[memoryview] = [body]
                size = len(body)
                count_found(count)
            else:
                found = (
                    ahead(queue, offset, nums, limit)
                    if accept is None
                    else in_memory(queue, offset, nums, limit, accept)
                )
                if found is None:
                    return None
                _, (buffers, count, size), following = found
                if not count or size > COPIED:
                    return None
                if accept is None:  # ``in_memory`` counts what it finds, ``ahead`` does not
                    count_found(count)
            if accept is None and following < queue.next_offset:
                self._expected = (queue, following, nums, limit)
            # Side effects start here.
            if sys_flag & PULL_COMMIT_OFFSET:
                offsets.commit(connection.peer_text, group, topic, queue_id, header.commit_offset)
            commit_pull(group, topic, queue_id, following)
            nums, sizes = reader.nums, reader.sizes
            nums.value += count
            nums.times += 1
            sizes.value += size
            sizes.times += 1
            broker_get.value += count
            broker_get.times += 1
            low = queue.min_offset if low_offset is None else low_offset(queue)
            text = reader.template % (queue.next_offset, low, following, request.opaque)
            length = len(text)
            return b"".join([_pack_words(length + 4 + size, length), text, *buffers])

        return serve

    def prepare(self) -> None:
        """Read what the consumer of the last pull will request next. Called while the loop is idle."""
        place, self._expected = self._expected, None
        if self._prepared is not None and self._prepared[0][0].deleted:
            self._prepared = None
        if place is None or place[0].deleted or not place[0].min_offset <= place[1] < place[0].next_offset:
            return
        found = self._ahead(*place)
        if found is not None:
            _, (buffers, count, size), following = found
            # A short result at the queue's end is not prepared: more messages may have arrived when the pull comes.
            if size <= COPIED and (count == place[2] or following < place[0].next_offset):
                self._prepared = place, b"".join(buffers), count, following

    def _find(self, group: str, topic: str) -> _Reader | None:
        """Check and cache a group's view of a topic at its first pull, or at the first after a change.

        None if the full path has to serve its pulls.
        """
        self._readers.pop((group, topic), None)
        if is_of_broker(group):  # the full path refuses its commits: checked here, other groups' pulls pay nothing
            return None
        its, of = self._groups.get(group), self._topics.get(topic)
        if its is None or of is None or not its.consume_enable or not of.perm & PERM_READ:
            return None
        if len(self._readers) >= _MAX_READERS:
            self._readers.clear()
        reader = self._readers[group, topic] = _Reader(its, of, *self._stats.group_counters(group, topic))
        return reader

    def _find_queue(self, reader: _Reader, queue_id: int) -> ConsumeQueue | None:
        if not 0 <= queue_id < reader.topic.read_queue_nums:
            return None
        queue = self._find_in_store(reader.topic.topic_name, queue_id)
        if queue is not None:
            reader.queues[queue_id] = queue
        return queue
