"""Administration of consumer groups and their offsets."""

from collections.abc import Iterable
from datetime import datetime

from trimq.client import offsets
from trimq.client.admin.base import AdminBase, each
from trimq.client.admin.models import ConsumeStats, OffsetWrapper, TimeSpan, as_kind, queue_table
from trimq.client.errors import RocketMQError, TopicNotFoundError, UsageError
from trimq.client.message import MessageQueue
from trimq.protocol import lenient_json
from trimq.protocol.body import SubscriptionData, SubscriptionGroupConfig, TopicList, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.admin import (
    CloneGroupOffsetRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetConsumeStatsRequestHeader,
    GroupRequestHeader,
    QueryConsumeTimeSpanRequestHeader,
    QuerySubscriptionByConsumerRequestHeader,
)
from trimq.protocol.headers.client import ResetOffsetRequestHeader
from trimq.protocol.topic_rules import dlq_topic, group_problem, retry_topic

MODES = ("PULL", "POP")


class GroupAdmin(AdminBase):
    """Consumer groups: their settings, progress and offsets."""

    async def groups(self, address: str) -> dict[str, SubscriptionGroupConfig]:
        """The settings of all consumer groups of a broker, by group.

        >>> async def example(admin: "Admin") -> int:
        ...     return (await admin.groups("127.0.0.1:10911"))["billing"].retry_max_times
        """
        reply = await self.client.request(address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
        table = lenient_json.loads(bytes(reply.body)).get("subscriptionGroupTable") or {}
        return {name: as_kind(value, SubscriptionGroupConfig) for name, value in table.items()}

    async def update_group(self, address: str, config: SubscriptionGroupConfig) -> None:
        """Creates or changes a group on a broker. Raises UsageError for an invalid group name.

        >>> async def example(admin: "Admin", config: SubscriptionGroupConfig) -> None:
        ...     await admin.update_group("127.0.0.1:10911", config)
        """
        problem = group_problem(config.group_name)
        if problem is not None:
            raise UsageError(problem)
        await self.client.request(address, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, encode_json(config))

    async def delete_group(self, address: str, group: str, *, clean_offset: bool = False) -> None:
        """Deletes a group on a broker, with its committed offsets if ``clean_offset``.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.delete_group("127.0.0.1:10911", "billing", clean_offset=True)
        """
        header = DeleteSubscriptionGroupRequestHeader(group_name=group, clean_offset=clean_offset)
        await self.client.request(address, RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    async def group_masters(self, group: str, topic: str | None = None) -> list[str]:
        """The masters that have a group: those of its retry topic, or of ``topic`` if there is no retry topic.

        Raises TopicNotFoundError if neither topic exists.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return await admin.group_masters("billing")
        """
        try:
            return await self.topic_masters(retry_topic(group))
        except TopicNotFoundError:
            if topic is None:
                raise
            return await self.topic_masters(topic)

    async def consume_stats(self, group: str, topic: str | None = None) -> ConsumeStats:
        """A group's progress in all its topics, or in one. Raises TopicNotFoundError for an unknown group.

        >>> async def lag(admin: "Admin") -> int:
        ...     return (await admin.consume_stats("billing")).lag
        """

        async def ask(address: str) -> ConsumeStats:
            header = GetConsumeStatsRequestHeader(consumer_group=group, topic=topic)
            reply = await self.client.request(address, RequestCode.GET_CONSUME_STATS, header)
            body = lenient_json.loads(bytes(reply.body))
            table = queue_table(body.get("offsetTable"))
            return ConsumeStats(
                float(body.get("consumeTps") or 0.0),
                {queue: as_kind(value, OffsetWrapper) for queue, value in table.items()},
            )

        found = ConsumeStats(0.0, {})
        for part in (await each(await self.group_masters(group, topic), ask)).values():
            found.consume_tps += part.consume_tps
            found.offsets.update(part.offsets)
        found.offsets = dict(sorted(found.offsets.items()))
        return found

    async def reset_offset(
        self,
        topic: str,
        group: str,
        when: datetime | float | None,
        *,
        force: bool = True,
        queue: MessageQueue | None = None,
        offset: int | None = None,
    ) -> dict[MessageQueue, int]:
        """Sets a group's offsets of a topic to those of a time, and returns the new offsets by queue.

        ``when`` is an aware datetime, or seconds since the epoch; None sets them to the queues' ends. Without
        ``force`` a time moves an offset only back, never forward. ``queue`` restricts the call to one queue, and
        ``offset`` then replaces the time. Running consumers continue from the new offsets.

        >>> async def replay_today(admin: "Admin", midnight: datetime) -> None:
        ...     await admin.reset_offset("Orders", "billing", midnight)
        """
        route = await self.route(topic)
        found: dict[MessageQueue, int] = {}
        for broker in sorted(route.broker_datas, key=lambda broker: broker.broker_name):
            address = broker.broker_addrs.get("0")
            if address is None or (queue is not None and queue.broker_name != broker.broker_name):
                continue
            header = ResetOffsetRequestHeader(
                topic=topic,
                group=group,
                timestamp=-1 if when is None else offsets.to_ms(when),
                is_force=force,
                queue_id=queue.queue_id if queue is not None else -1,
                offset=offset if offset is not None else -1,
            )
            reply = await self.client.request(address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
            table = queue_table(lenient_json.loads(bytes(reply.body) or b"{}").get("offsetTable"))
            found.update({place: int(number) for place, number in table.items()})
        return dict(sorted(found.items()))

    async def set_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Sets a group's committed offset of one queue.

        A running consumer is not affected and overwrites the offset at its next commit; see ``reset_offset``.

        >>> async def example(admin: "Admin", queue: MessageQueue) -> None:
        ...     await admin.set_offset("billing", queue, 0)
        """
        await offsets.commit_offset(self.client, group, queue, offset)

    async def offset_of(self, group: str, queue: MessageQueue) -> int | None:
        """A group's committed offset of one queue; None if it has none.

        >>> async def example(admin: "Admin", queue: MessageQueue) -> int | None:
        ...     return await admin.offset_of("billing", queue)
        """
        return await offsets.committed_offset(self.client, group, queue)

    async def clone_offsets(self, source: str, target: str, topic: str | None = None) -> dict[MessageQueue, int]:
        """Copies the committed offsets of a group to another, for one topic or all; returns them by queue.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.clone_offsets("billing", "billing-2", "Orders")
        """
        stats = await self.consume_stats(source, topic)
        given = {}
        for queue, wrapper in stats.offsets.items():
            if queue.topic == retry_topic(source):
                continue
            given[queue] = wrapper.consumer_offset
            await self.set_offset(target, queue, wrapper.consumer_offset)
        return given

    async def clone_offsets_at_broker(self, address: str, source: str, target: str, topic: str | None = None) -> None:
        """As ``clone_offsets``, but carried out by one broker for its own queues.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.clone_offsets_at_broker("127.0.0.1:10911", "billing", "billing-2")
        """
        header = CloneGroupOffsetRequestHeader(src_group=source, dest_group=target, topic=topic, offline=False)
        await self.client.request(address, RequestCode.CLONE_GROUP_OFFSET, header)

    async def set_consume_mode(self, address: str, topic: str, group: str, mode: str, *, share: int = 0) -> None:
        """Sets whether a group consumes a topic by PULL or by POP.

        ``share`` is the number of queues that POP clients share. Raises UsageError for another mode.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.set_consume_mode("127.0.0.1:10911", "Orders", "billing", "POP", share=8)
        """
        if mode not in MODES:
            raise UsageError(f"the mode {mode!r} is neither PULL nor POP")
        body = {"topic": topic, "consumerGroup": group, "mode": mode, "popShareQueueNum": share}
        await self.client.request(address, RequestCode.SET_MESSAGE_REQUEST_MODE, {}, encode_json(body))

    async def group_topics(self, group: str) -> list[str]:
        """The topics of which a group has committed offsets, sorted.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return await admin.group_topics("billing")
        """

        async def ask(address: str) -> list[str]:
            header = GroupRequestHeader(group=group)
            answer = await self._ask(address, RequestCode.QUERY_TOPICS_BY_CONSUMER, header, TopicList)
            return answer.topic_list

        found = await each(await self.group_masters(group), ask)
        return sorted({topic for topics in found.values() for topic in topics})

    async def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """A group's subscription to a topic; None if no broker knows one.

        >>> async def example(admin: "Admin") -> str | None:
        ...     found = await admin.subscription("billing", "Orders")
        ...     return found.sub_string if found else None
        """
        for address in await self.group_masters(group, topic):
            header = QuerySubscriptionByConsumerRequestHeader(group=group, topic=topic)
            reply = await self.client.request(address, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, header)
            data = lenient_json.loads(bytes(reply.body)).get("subscriptionData")
            if data:
                found: SubscriptionData = as_kind(data, SubscriptionData)
                return found
        return None

    async def time_spans(self, group: str, topic: str) -> list[TimeSpan]:
        """The store times of a topic's queues, and how far a group is behind in time.

        >>> async def example(admin: "Admin") -> int:
        ...     return max(span.delay_time for span in await admin.time_spans("billing", "Orders"))
        """

        async def ask(address: str) -> list[TimeSpan]:
            header = QueryConsumeTimeSpanRequestHeader(topic=topic, group=group)
            answer = await self._ask(address, RequestCode.QUERY_CONSUME_TIME_SPAN, header, dict[str, list[TimeSpan]])
            return answer.get("consumeTimeSpanSet", [])

        found = await each(await self.topic_masters(topic), ask)
        return sorted((span for spans in found.values() for span in spans), key=lambda span: span.message_queue)

    async def delete_group_topics(self, group: str, addresses: Iterable[str]) -> None:
        """Deletes a group's retry topic and dead-letter topic on brokers, and at the name servers.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.delete_group_topics("billing", await admin.addresses())
        """
        for topic in (retry_topic(group), dlq_topic(group)):
            for address in addresses:
                try:
                    await self.client.request(address, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic})
                except RocketMQError as error:
                    if error.code != ResponseCode.TOPIC_NOT_EXIST:
                        raise
            for server in self.client.name_servers.addresses:
                await self.client.request(server, RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": topic})
