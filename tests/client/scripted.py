"""A name server and a broker at one address, in the test's event loop, whose answers the test defines."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import SocketAttribute, SocketStream

from trimq.protocol.body import BrokerData, QueueData, TopicRouteData, encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.protocol.record import encode_record, pack_host

Answer = Callable[[RemotingCommand], RemotingCommand | None]


def records(first: int, count: int) -> bytes:
    """The body of a pull's reply: messages of queue 0 of the topic T, each with its offset as its body."""
    return b"".join(
        encode_record(
            topic=b"T",
            body=b"%d" % offset,
            queue_id=0,
            queue_offset=offset,
            properties=b"",
            physical_offset=0,
            born_timestamp=0,
            born_host=pack_host("127.0.0.1", 1),
            store_timestamp=0,
            store_host=pack_host("127.0.0.1", 1),
        )
        for offset in range(first, first + count)
    )


def pull_header(next_offset: int) -> dict[str, str]:
    """The header of a pull's reply."""
    offsets = {"nextBeginOffset": str(next_offset), "minOffset": "0", "maxOffset": "1000"}
    return {"suggestWhichBrokerId": "0", **offsets}


def route_reply(
    command: RemotingCommand, addresses: dict[str, str], *, name: str = "a", queues: int = 1
) -> RemotingCommand:
    """The reply to a route request: one broker, with the addresses of its members by their ids."""
    brokers = [BrokerData(cluster="c", broker_name=name, broker_addrs=addresses)]
    queue_data = [QueueData(broker_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=6)]
    return command.reply(body=encode_json(TopicRouteData(broker_datas=brokers, queue_datas=queue_data)))


class ScriptedBroker:
    """A server whose ``answers`` has a function for each request code; a result of None sends no reply.

    Requests with other codes get an empty reply. ``seen`` has the requests received, each with its connection.
    """

    def __init__(self, queues: int = 1) -> None:
        self.address = ""
        self.queues = queues
        self.seen: list[tuple[SocketStream, RemotingCommand]] = []
        self.counts: Counter[int] = Counter()
        self.arrived = anyio.Event()
        self._sending = anyio.Lock()
        self.answers: dict[int, Answer] = {RequestCode.GET_ROUTEINFO_BY_TOPIC: self.route}

    async def serve(self, stream: SocketStream) -> None:
        """Serve one connection until it ends."""
        decoder = FrameDecoder()
        try:
            while True:
                for command in decoder.feed(await stream.receive()):
                    self.seen.append((stream, command))
                    self.counts[command.code] += 1
                    self.arrived.set()
                    self.arrived = anyio.Event()
                    reply = self.answers.get(command.code, RemotingCommand.reply)(command)
                    if reply is not None and not command.is_oneway:
                        await self.send(stream, reply)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:  # also if the test ends first: a transport left open would be a warning in a later test
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def send(self, stream: SocketStream, command: RemotingCommand) -> None:
        """Send one frame; replies and the broker's own requests may be sent at the same time."""
        async with self._sending:
            await stream.send(encode(command))

    def route(self, command: RemotingCommand) -> RemotingCommand:
        """A route for any topic, which names this broker."""
        count = 1 if command.ext_fields()["topic"].startswith("%RETRY%") else self.queues
        return route_reply(command, {"0": self.address}, queues=count)

    async def until(self, code: int, count: int) -> list[RemotingCommand]:
        """Wait until ``count`` requests of a code have been received, and return all of them."""
        while self.counts[code] < count:
            await self.arrived.wait()
        return [command for _, command in self.seen if command.code == code]


@asynccontextmanager
async def scripted_broker(queues: int = 1) -> AsyncIterator[ScriptedBroker]:
    """A broker that listens while the block runs."""
    broker = ScriptedBroker(queues)
    async with listening(broker):
        yield broker


@asynccontextmanager
async def listening(broker: ScriptedBroker) -> AsyncIterator[None]:
    """Let a broker listen while the block runs."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        broker.address = f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        tasks.start_soon(listener.serve, broker.serve)
        yield
        tasks.cancel_scope.cancel()
