"""Administration of topics."""

from msgspec import structs

from trimq.client.admin.base import AdminBase, each
from trimq.client.admin.models import GroupList, QueueUnits, TopicOffset, as_kind, queue_table
from trimq.client.errors import NoBrokerError, TopicNotFoundError, UsageError
from trimq.protocol import lenient_json
from trimq.protocol.body import MessageQueue, TopicConfig, TopicConfigSerializeWrapper, TopicList, decode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.headers.admin import CreateTopicRequestHeader, QueryConsumeQueueRequestHeader, TopicRequestHeader
from trimq.protocol.headers.namesrv import DeleteTopicFromNamesrvRequestHeader, GetTopicsByClusterRequestHeader
from trimq.protocol.topic_rules import AUTO_CREATE_TOPIC, topic_problem


class TopicAdmin(AdminBase):
    """Topics: their names, routes, queues and settings."""

    async def topics(self, cluster: str | None = None) -> list[str]:
        """The names of all topics, or of those in a cluster, sorted.

        >>> async def example(admin: "Admin") -> bool:
        ...     return "Orders" in await admin.topics()
        """
        if cluster is None:
            reply = await self.client.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        else:
            header = GetTopicsByClusterRequestHeader(cluster=cluster)
            reply = await self.client.ask_name_server(RequestCode.GET_TOPICS_BY_CLUSTER, header)
        return sorted(decode_json(reply.body, TopicList).topic_list)

    async def topic_clusters(self, topic: str) -> list[str]:
        """The clusters that have a topic, sorted. Raises TopicNotFoundError.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return await admin.topic_clusters("Orders")
        """
        return sorted({broker.cluster for broker in (await self.route(topic)).broker_datas})

    async def topic_groups(self, topic: str) -> list[str]:
        """The consumer groups that have committed offsets of a topic, sorted. Raises TopicNotFoundError.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return await admin.topic_groups("Orders")
        """

        async def ask(address: str) -> list[str]:
            header = TopicRequestHeader(topic=topic)
            answer = await self._ask(address, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, header, GroupList)
            return answer.group_list

        found = await each(await self.topic_masters(topic), ask)
        return sorted({group for groups in found.values() for group in groups})

    async def topic_stats(self, topic: str) -> dict[MessageQueue, TopicOffset]:
        """The first and next offset of each of a topic's queues. Raises TopicNotFoundError.

        >>> async def example(admin: "Admin") -> int:
        ...     return sum(each.max_offset - each.min_offset for each in (await admin.topic_stats("Orders")).values())
        """

        async def ask(address: str) -> dict[MessageQueue, TopicOffset]:
            header = TopicRequestHeader(topic=topic)
            reply = await self.client.request(address, RequestCode.GET_TOPIC_STATS_INFO, header)
            table = queue_table(lenient_json.loads(bytes(reply.body)).get("offsetTable"))
            return {queue: as_kind(value, TopicOffset) for queue, value in table.items()}

        found: dict[MessageQueue, TopicOffset] = {}
        for table in (await each(await self.topic_masters(topic), ask)).values():
            found.update(table)
        return dict(sorted(found.items()))

    async def topic_configs(self, address: str) -> dict[str, TopicConfig]:
        """The settings of all topics of a broker, by topic.

        >>> async def example(admin: "Admin") -> int:
        ...     return (await admin.topic_configs("127.0.0.1:10911"))["Orders"].perm
        """
        wrapper = await self._ask(address, RequestCode.GET_ALL_TOPIC_CONFIG, None, TopicConfigSerializeWrapper)
        return wrapper.topic_config_table

    async def topic_config(self, address: str, topic: str) -> TopicConfig:
        """The settings of a topic on a broker. Raises TopicNotFoundError.

        >>> async def example(admin: "Admin") -> int:
        ...     return (await admin.topic_config("127.0.0.1:10911", "Orders")).write_queue_nums
        """
        header = TopicRequestHeader(topic=topic, lo=True)
        return await self._ask(address, RequestCode.GET_TOPIC_CONFIG, header, TopicConfig)

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int = 8,
        perm: int = 6,
        cluster: str | None = None,
        broker: str | None = None,
    ) -> list[str]:
        """Creates or changes a topic on all masters, or those of ``cluster`` or ``broker``; returns their addresses.

        ``queues`` is the number of queues on each broker. ``perm`` is 6 for read and write, 4 for read, 2 for write.
        Raises UsageError for an invalid topic name, and for an unknown cluster or broker.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.create_topic("Orders", queues=4, cluster="DefaultCluster")
        """
        config = TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
        addresses = await self.addresses(cluster=cluster, broker=broker)
        for address in addresses:
            await self.update_topic(address, config)
        return addresses

    async def update_topic(self, address: str, config: TopicConfig, *, attributes: str | None = None) -> None:
        """Creates or changes a topic on one broker. ``attributes`` are changes of the form ``+key=value,-key``.

        Raises UsageError for an invalid topic name.

        >>> async def example(admin: "Admin", config: TopicConfig) -> None:
        ...     await admin.update_topic("127.0.0.1:10911", config)
        """
        problem = topic_problem(config.topic_name)
        if problem is not None:
            raise UsageError(problem)
        header = CreateTopicRequestHeader(
            topic=config.topic_name,
            default_topic=AUTO_CREATE_TOPIC,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=config.perm,
            topic_filter_type=config.topic_filter_type,
            topic_sys_flag=config.topic_sys_flag,
            order=config.order,
            attributes=attributes,
        )
        await self.client.request(address, RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    async def update_topic_perm(self, topic: str, perm: int, *, broker: str | None = None) -> dict[str, int]:
        """Changes a topic's permission on the masters that have it, or on one; returns the one before, by address.

        >>> async def read_only(admin: "Admin") -> None:
        ...     await admin.update_topic_perm("Orders", 4)
        """
        addresses = await self.topic_masters(topic) if broker is None else await self.addresses(broker=broker)
        before = {}
        for address in addresses:
            config = await self.topic_config(address, topic)
            before[address] = config.perm
            await self.update_topic(address, structs.replace(config, perm=perm))
        return before

    async def delete_topic(self, topic: str, *, cluster: str | None = None) -> list[str]:
        """Deletes a topic with its messages on all brokers, or on those of a cluster, and at the name servers.

        Returns the addresses of the brokers.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.delete_topic("Orders")
        """
        addresses = await self.addresses(cluster=cluster, masters_only=False)
        for address in addresses:
            await self.client.request(address, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequestHeader(topic=topic))
        header = DeleteTopicFromNamesrvRequestHeader(topic=topic, cluster_name=cluster)
        for server in self.client.name_servers.addresses:
            await self.client.request(server, RequestCode.DELETE_TOPIC_IN_NAMESRV, header)
        return addresses

    async def queue_units(
        self, address: str, queue: MessageQueue, index: int, count: int, *, group: str | None = None
    ) -> QueueUnits:
        """Up to ``count`` units of a consume queue, starting at ``index``. The filter of ``group`` is tried on them.

        >>> async def example(admin: "Admin", queue: MessageQueue) -> int:
        ...     return (await admin.queue_units("127.0.0.1:10911", queue, 0, 10)).queue_data[0].tags_code
        """
        header = QueryConsumeQueueRequestHeader(
            topic=queue.topic, queue_id=queue.queue_id, index=index, count=count, consumer_group=group
        )
        return await self._ask(address, RequestCode.QUERY_CONSUME_QUEUE, header, QueueUnits)

    async def clean_unused_topics(self, address: str) -> None:
        """Makes a broker delete the consume queues of topics that do not exist any more.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.clean_unused_topics("127.0.0.1:10911")
        """
        await self.client.request(address, RequestCode.CLEAN_UNUSED_TOPIC, {})

    async def clean_expired_queues(self, address: str) -> None:
        """Makes a broker delete consume queues without a message in the commit log.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.clean_expired_queues("127.0.0.1:10911")
        """
        await self.client.request(address, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, {})

    async def delete_expired_commit_log(self, address: str) -> None:
        """Makes a broker delete expired commit log files now.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.delete_expired_commit_log("127.0.0.1:10911")
        """
        await self.client.request(address, RequestCode.DELETE_EXPIRED_COMMITLOG, {})

    async def system_topics(self, address: str) -> list[str]:
        """The internal topics of a broker, sorted.

        >>> async def example(admin: "Admin") -> bool:
        ...     return "TBW102" in await admin.system_topics("127.0.0.1:10911")
        """
        answer = await self._ask(address, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, None, TopicList)
        return sorted(answer.topic_list)

    async def has_topic(self, topic: str) -> bool:
        """Whether the name servers have a route for a topic.

        >>> async def example(admin: "Admin") -> bool:
        ...     return await admin.has_topic("Orders")
        """
        try:
            await self.route(topic)
        except (TopicNotFoundError, NoBrokerError):
            return False
        return True
