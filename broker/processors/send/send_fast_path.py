"""The fast path of a send: from its header, decoded in one pass, to the bytes of its reply.

It serves ordinary messages to existing topics: a JSON header, no flag or property that has a meaning for the broker,
and space in the log. All other sends are left to send.py before there are side effects. The full path gets the same
decoded header and knows every case and every refusal. Tests compare the records and replies of both paths.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from msgspec import Struct

from trimq.broker.config import BrokerConfig
from trimq.broker.processors.common import born_host
from trimq.broker.services.stats import BrokerStats, StatsItem
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore, TopicIllegalError, TopicQueue
from trimq.broker.store.types import PutMessageResult
from trimq.protocol import sysflag
from trimq.protocol.body import PERM_WRITE, TopicConfig
from trimq.protocol.codes import VERSION, RequestCode
from trimq.protocol.command import LANGUAGE, RemotingCommand
from trimq.protocol.hashing import tags_code
from trimq.protocol.headers.send import SendMessageRequestHeader, SendMessageRequestHeaderV2
from trimq.protocol.message_keys import TAG_KEY, key_words
from trimq.protocol.property_names import PROPERTY_CLUSTER, PROPERTY_MSG_REGION, PROPERTY_TRACE_ON
from trimq.protocol.property_text import Matcher, join_properties, ordinary
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.topic_rules import NO_SEND_TOPICS, SCHEDULE_TOPIC, topic_problem
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import DEFERRED, FastHandler, Later

HEADERS: Final[dict[int, type[Struct]]] = {
    RequestCode.SEND_MESSAGE: SendMessageRequestHeader,
    RequestCode.SEND_MESSAGE_V2: SendMessageRequestHeaderV2,
}
"""The header of each form of a send."""
MEANINGLESS: Final = sysflag.COMPRESSED | sysflag.MULTI_TAGS | sysflag.COMPRESSION_MASK
"""Bits of sysFlag that have no meaning for the broker and are stored as they are."""
_LONGEST_REPLY: Final = 1024
_LONGEST_UNIQUE: Final = 256
"""Sends with longer unique keys, which no client makes, go to the full path: _WORDS has no entry for their replies."""
_WORDS: Final = tuple((size + 4).to_bytes(4, "big") + size.to_bytes(4, "big") for size in range(_LONGEST_REPLY))
"""The two length words in front of a reply's header, by the length of the header."""


class SendTopic:
    """A topic's data for sends. Valid while ``config`` is the object in the table of topics."""

    __slots__ = ("config", "nums", "queues", "sizes")

    def __init__(self, config: TopicConfig, nums: StatsItem, sizes: StatsItem) -> None:
        self.config = config
        self.queues: dict[int, TopicQueue] = {}
        self.nums = nums
        self.sizes = sizes


class SendFastPath:
    """Serves ordinary sends."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        store: MessageStore,
        stats: BrokerStats,
        store_host: bytes,
        answer: Callable[..., bytes | RemotingCommand],
    ) -> None:
        self.answer = answer
        """Makes the reply for (command, topic, queue id, unique key, result), for any result of the put."""
        self.store_host = store_host
        self.put = store.put_now
        self.waits = store.syncs_each_put
        self.tags = store.indexes_tags
        """Whether tags are keys of the index as well."""
        self.broker_put = stats.broker_put
        self.topics = topics
        self._configuration = configuration
        self._table = topics.table
        self._stats = stats
        self._topic_queue = store.topic_queue
        self._topics: dict[str, SendTopic] = {}
        self._own_topics: dict[str, SendTopic] = {}
        self.usable = False
        """Whether the configuration permits any send on the fast path."""
        self.ordinary: Matcher = ordinary(frozenset())
        """Matches the properties of messages that may take the fast path."""
        self.store: Callable[..., bytes | Literal[Later.DEFERRED] | None]
        """The second half of ``serve``, for a caller that has read the request already: see ``_handler``."""
        self.serve: FastHandler = self._handler()
        """For both forms of a send."""
        self.configure(frozenset())
        topics.delete_listeners.append(self._forget)

    def configure(self, reserved: frozenset[str]) -> None:
        """Compute the parts that all sends share from the current configuration.

        ``reserved``: messages with one of these properties take the full path.
        """
        self.reserved = reserved
        self.ordinary = ordinary(reserved)
        config = self._configuration.section(BrokerConfig)
        region, trace = config.region_id, "true" if config.trace_on else "false"
        self.region, self.trace = region, trace
        added = {PROPERTY_MSG_REGION: region, PROPERTY_TRACE_ON: trace, PROPERTY_CLUSTER: config.broker_cluster_name}
        self.added = join_properties(added).encode()
        self.template = (
            f'{{"code":0,"extFields":{{"MSG_REGION":"{region}","TRACE_ON":"{trace}",'
            f'"msgId":"{self.store_host.hex().upper()}%016X","queueId":"%d","queueOffset":"%d","transactionId":"%b"}},'
            f'"flag":1,"language":"{LANGUAGE}","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
        ).encode()
        self.usable = bool(
            len(self.store_host) == 8
            and not config.start_accept_send_request_time_stamp
            and config.broker_permission & PERM_WRITE  # without it only order topics are refused: send.py decides
            and len(self.template) < _LONGEST_REPLY // 2
            and region.isascii()
            and region.isprintable()
            and not set('"\\%') & set(region)
        )

    def _handler(self) -> FastHandler:
        topics = self._topics
        table = self._table
        put = self.put
        waits = self.waits
        broker_put = self.broker_put
        tags = self.tags

        def store(  # noqa: PLR0913, PLR0917 - one call with all values that both readers have parsed
            connection: Connection,
            topic: SendTopic,
            queue_id: int,
            body: memoryview,
            properties: bytes,
            born_timestamp: int,
            flag: int,
            sys_flag: int,
            reconsume_times: int,
            code: int,
            keys: tuple[str, ...],
            unique: bytes,
            opaque: int,
        ) -> bytes | Literal[Later.DEFERRED] | None:
            queue = topic.queues.get(queue_id)
            if queue is None:
                queue = self._find_queue(topic, queue_id)
                if queue is None:
                    return None
            message = MessageInner(
                queue.topic,
                queue_id,
                body,
                properties,
                born_timestamp,
                connection.data.get("host") or born_host(connection),
                self.store_host,
                flag,
                sys_flag,
                reconsume_times,
                0,
                code,
                keys,
                True,
                queue,
            )
            done = partial(self._durable, connection, topic, queue_id, unique, opaque) if waits else None
            result = put(message, done)
            if result is None:  # nothing was appended: no space now, or a limit that the full path reports
                return None
            if waits:  # not counted before the disk has it: ``_durable`` counts
                return DEFERRED
            nums = topic.nums  # as ``_count``, without the call
            nums.value += 1
            nums.times += 1
            sizes = topic.sizes
            sizes.value += result.size
            sizes.times += 1
            broker_put.value += 1
            broker_put.times += 1
            reply = self.template % (result.physical_offset, queue_id, result.queue_offset, unique, opaque)
            return _WORDS[len(reply)] + reply

        def serve(connection: Connection, request: TypedRequest[Any]) -> bytes | Literal[Later.DEFERRED] | None:
            header = request.header
            name = header.topic
            topic = topics.get(name)
            # A changed topic is a new object in the table, so identity shows that the checks of ``_find`` still hold.
            if topic is None or topic.config is not table.get(name):
                topic = self._find(name)
                if topic is None:
                    return None
            text = header.properties
            if (
                text is None
                or len(text) > MAX_PROPERTIES
                or request.flag
                or header.batch
                or header.sys_flag & ~MEANINGLESS
            ):
                return None
            match = self.ordinary(text)
            if match is None:
                return None
            keys, unique, tag = match.groups()
            body = request.body
            if unique is None or len(unique) > _LONGEST_UNIQUE or not len(body):
                return None
            words = (unique,) if keys is None else (unique, keys) if keys.isalnum() else (unique, *key_words(keys))
            return store(
                connection,
                topic,
                header.queue_id,
                body,
                text.encode() + self.added,
                header.born_timestamp,
                header.flag,
                header.sys_flag,
                header.reconsume_times or 0,
                tags_code(tag) if tag else 0,
                words if tag is None or not tags else (*words, TAG_KEY + tag),
                unique.encode(),
                request.opaque,
            )

        self.store = store
        return serve

    def _durable(
        self,
        connection: Connection,
        topic: SendTopic,
        queue_id: int,
        unique: bytes,
        opaque: int,
        result: PutMessageResult,
    ) -> None:
        """Reply to a send that has waited for the disk."""
        status = result.status
        if status:
            # The request was not retained. A reply needs only its opaque, and is the same for both forms of a send.
            command = RemotingCommand(RequestCode.SEND_MESSAGE_V2, opaque)
            connection.complete(self.answer(command, topic.config.topic_name, queue_id, unique.decode(), result))
            return
        self._count(topic, result.size)
        reply = self.template % (result.physical_offset, queue_id, result.queue_offset, unique, opaque)
        connection.complete(_WORDS[len(reply)] + reply)

    def _count(self, topic: SendTopic, size: int) -> None:
        """Count a stored message. ``store`` does the same without the call."""
        nums, sizes, broker_put = topic.nums, topic.sizes, self.broker_put
        nums.value += 1
        nums.times += 1
        sizes.value += size
        sizes.times += 1
        broker_put.value += 1
        broker_put.times += 1

    def topic(self, name: str) -> SendTopic | None:
        """A topic's data for sends; None if they have to take the full path."""
        topic = self._topics.get(name)
        if topic is None or topic.config is not self._table.get(name):
            topic = self._find(name)
        return topic

    def own_topic(self, name: str) -> SendTopic | None:
        """The data of a topic of the broker's own, which clients must not send to."""
        topic = self._own_topics.get(name)
        config = self._table.get(name)
        if config is not None and (topic is None or topic.config is not config):
            topic = self._own_topics[name] = SendTopic(config, *self._stats.topic_counters(name))
        return topic

    def queue(self, topic: SendTopic, queue_id: int) -> TopicQueue | None:
        """A writable queue of a topic, cached in ``topic.queues``; None if there is none."""
        queue = topic.queues.get(queue_id)
        return queue if queue is not None and not queue.deleted else self._find_queue(topic, queue_id)

    def _find(self, name: str) -> SendTopic | None:
        """Check and cache a topic at its first send, or at the first after a change."""
        self._topics.pop(name, None)
        config = self._table.get(name)
        if (
            config is None
            or name in NO_SEND_TOPICS
            or name == SCHEDULE_TOPIC
            or name[:1] == "%"
            or topic_problem(name) is not None  # a state file may hold a name that no request could create
        ):
            return None
        topic = self._topics[name] = SendTopic(config, *self._stats.topic_counters(name))
        return topic

    def _forget(self, name: str) -> None:
        self._topics.pop(name, None)

    def _find_queue(self, topic: SendTopic, queue_id: int) -> TopicQueue | None:
        if not 0 <= queue_id < topic.config.write_queue_nums:
            return None
        try:
            queue = topic.queues[queue_id] = self._topic_queue(topic.config.topic_name, queue_id)
        except TopicIllegalError:
            return None
        return queue
