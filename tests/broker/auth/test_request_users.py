"""Replies go to the user who has sent the request, even if other users register the id of the client."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.broker.auth.signed import User, closed_broker, secret_of, signed
from tests.broker.auth.test_what_clients_get import producer
from tests.broker.fast_paths import fast_paths
from tests.broker.wire_client import WireClient, properties_text, send_ext
from tests.namesrv.server import running
from trimq.broker.auth import request_users
from trimq.broker.auth.request_users import MOST_OF_USER, SECONDS, RequestUsers
from trimq.broker.controller import BrokerController
from trimq.client import ClientOptions, Consumer, Credentials, Message, Producer
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode
from trimq.protocol.native import NATIVE
from trimq.remoting.auth.permit import Permit
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.connection import Connection

PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
REPLIES = "DefaultCluster_REPLY_TOPIC"
NOT_FOUND = "push reply message fail, channel of <asker> not found."


def request(correlation: str = "c-1", client_id: str = "asker") -> dict[str, str]:
    """The properties of a request."""
    ids = {"CORRELATION_ID": correlation, "REPLY_TO_CLIENT": client_id, "TTL": "3000"}
    return {"UNIQ_KEY": "7F0000010001AABB0000000000000001"} | ids


@asynccontextmanager
async def broker_with(directory: Path, *users: str, **changes: Any) -> AsyncIterator[tuple[BrokerController, User]]:
    async with closed_broker(directory, **changes) as (broker, root):
        assert (await root.ask(310, send_ext("T"), b"makes the topic")).code == 0
        for user in users:
            await root.make(user, *(["Topic:T Pub"] if user != "stranger" else []))
        yield broker, root


async def asks(user: User, correlation: str = "c-1", **more: Any) -> None:
    assert (await user.ask(310, send_ext("T", request(correlation), **more), b"a question")).code == 0


async def replied(root: User, correlation: str = "c-1", client_id: str = "asker") -> int:
    properties = request(correlation, client_id) | {"MSG_TYPE": "reply"}
    return await root.post(325, send_ext(REPLIES, properties), b"answer")


async def delivered(root: User, to: User, correlation: str = "c-1") -> None:
    """A reply goes to ``to``."""
    opaque = await replied(root, correlation)
    await to.client.answer(await to.client.asked_for(PUSH))
    assert (await root.client.reply(opaque)).code == 0


async def dropped(root: User, correlation: str = "c-1") -> None:
    """A reply goes to no connection."""
    answer = await root.client.reply(await replied(root, correlation))
    assert (answer.code, answer.remark) == (1, NOT_FOUND)
    assert int(answer.ext_fields()["queueOffset"]) >= 0  # it is stored


@pytest.mark.parametrize("first", ["app", "stranger"])
async def test_who_registers_the_id_of_a_client_first_or_later_does_not_get_its_replies(
    tmp_path: Path, first: str
) -> None:
    async with broker_with(tmp_path, "app", "stranger") as (broker, root), AsyncExitStack() as stack:
        order = ("app", "stranger") if first == "app" else ("stranger", "app")
        users = {name: await producer(stack, broker, name, "asker") for name in order}
        app = users["app"]
        await asks(app)
        await delivered(root, app)
        newest = await producer(stack, broker, "app", "asker")
        await producer(stack, broker, "stranger", "asker")
        await delivered(root, newest)
        await newest.client.stream.aclose()
        with trio.fail_after(10):
            while broker.context.producers.find_of_user("asker", "app") is not app_connection(broker):
                await trio.lowlevel.checkpoint()
        await delivered(root, app)
        assert not users["stranger"].client.asked


def app_connection(broker: BrokerController) -> Connection:
    connections = broker.context.producers._clients["asker"]
    return next(one for one, user in connections.items() if user == "app")


async def test_only_the_user_of_the_request_gets_the_reply(tmp_path: Path) -> None:
    """While it has no connection, or has one with another id, the only one who has the id gets nothing."""
    async with broker_with(tmp_path, "app", "stranger") as (broker, root), AsyncExitStack() as stack:
        stranger = await producer(stack, broker, "stranger", "asker")
        app = await producer(stack, broker, "app", "another")
        await asks(app)
        await dropped(root)
        assert not stranger.client.asked
        app = await producer(stack, broker, "app", "asker")
        await delivered(root, app)


async def test_a_request_that_was_read_cannot_be_made_ones_own(tmp_path: Path) -> None:
    async with broker_with(tmp_path, "app", "reader") as (broker, root), AsyncExitStack() as stack:
        app = await producer(stack, broker, "app", "asker")
        reader = await producer(stack, broker, "reader", "asker")
        await asks(app)
        await asks(reader)
        await delivered(root, app)
        await asks(reader, "c-2")
        await delivered(root, reader, "c-2")
        # a consumer that sends the request to its retry topic has not asked, also on a broker that does not know it
        await root.grant("reader", "Group:G Sub")
        retry = send_ext("%RETRY%G", request("c-3"))
        assert (await root.ask(200, body=b'{"groupName":"G"}')).code == 0
        assert (await reader.ask(310, retry, b"again")).code == 0
        assert users_of(broker).user_of("asker", "c-3") is None


def users_of(broker: BrokerController) -> RequestUsers:
    found = broker.context.request_users
    assert found is not None
    return found


async def test_a_reply_whose_request_is_not_known_goes_to_the_only_user_with_the_id(tmp_path: Path) -> None:
    """The request was sent to another broker of the cluster, or before a restart."""
    async with broker_with(tmp_path, "app", "stranger") as (broker, root), AsyncExitStack() as stack:
        await producer(stack, broker, "app", "asker")
        newest = await producer(stack, broker, "app", "asker")
        await delivered(root, newest)
        stranger = await producer(stack, broker, "stranger", "asker")
        await dropped(root)
        assert not stranger.client.asked
        assert not newest.client.asked


async def test_requests_are_forgotten_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_users, "SECONDS", 60.0)  # less than after which silent connections are closed
    clock = ManualClock()
    async with broker_with(tmp_path, "app", "stranger", clock=clock) as (broker, root), AsyncExitStack() as stack:
        app = await producer(stack, broker, "app", "asker")
        await producer(stack, broker, "stranger", "asker")
        await asks(app)
        clock.advance(59)
        await delivered(root, app)
        clock.advance(1)
        await dropped(root)
        assert len(users_of(broker)) == 0


async def test_without_signed_heartbeats_or_without_authentication_requests_are_not_looked_at(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"authenticationWhitelist": "34"}, {"authenticationEnabled": False}]
    for number, change in enumerate(changes):
        change |= {"authorizationEnabled": False}
        async with closed_broker(tmp_path / str(number), **change) as (broker, root), AsyncExitStack() as stack:
            assert broker.context.request_users is None
            assert not broker.gate.properties
            await producer(stack, broker, "root", "asker")
            await delivered(root, await producer(stack, broker, "root", "asker"))


async def test_requests_that_need_no_signature_have_no_user(tmp_path: Path) -> None:
    async with broker_with(tmp_path, "app", authenticationWhitelist="310") as (broker, root), AsyncExitStack() as stack:
        app = await producer(stack, broker, "app", "asker")
        await asks(app)
        assert len(users_of(broker)) == 0
        await delivered(root, app)


# on all paths


def batch(*properties: dict[str, str]) -> bytes:
    return encode_batch([(0, b"in a batch", properties_text(each).encode()) for each in properties])


USUAL = {"UNIQ_KEY": "7F0000010001AABB0000000000000002"}


def requests() -> Iterator[tuple[str, int, dict[str, Any], bytes]]:
    """The correlation id of a request, and its code, fields and body."""
    yield "one", 310, send_ext("T", request("one")), b"x"
    yield "two", 10, send_ext("T", request("two"), v1=True), b"x"
    yield "three", 320, send_ext("T", batch="true"), batch(USUAL, request("three"), USUAL)
    yield "four", 320, send_ext("T", USUAL, batch="true"), batch(request("four"))
    yield "five", 310, send_ext("T", batch="true"), batch(request("five"))
    yield "six", 10, send_ext("T", v1=True, batch="true"), batch(request("six"))
    half = request("eight") | {"TRAN_MSG": "true", "PGROUP": "P"}
    yield "eight", 310, send_ext("T", half, sys_flag=4), b"x"
    yield "seven", 310, send_ext("T", properties_text({"A": "1"} | request("seven"))[:-1]), b"x"


def only_python(broker: BrokerController) -> None:
    """Close the grouped servers, and with them the native path of single sends."""
    for connection in broker.reactor.connections.values():
        table = connection.table
        for code, route in list(table.routes.items()):
            table.route(code, replace(route, grouped=None))


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.ROCKETMQ])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("native", [False, True])
async def test_fast_paths_leave_requests_and_nothing_else_to_the_full_path(
    tmp_path: Path, native: bool, together: bool, encoding: Encoding
) -> None:
    async with (
        broker_with(tmp_path, "app") as (broker, _),
        WireClient.connect(broker.endpoint, encoding) as client,
    ):
        app = User(client, "app")
        usual = [
            (310, send_ext("T", USUAL), b"x"),
            (10, send_ext("T", USUAL, v1=True), b"x"),
            # the word in a body is no property
            (320, send_ext("T", USUAL, batch="true"), encode_batch([(0, b"REPLY_TO_CLIENT\x01asker\x02", b"")])),
        ]
        for each in usual * 2:  # the first requests of a user, and of a queue, take the full path
            assert (await app.ask(*each)).code == 0
        if not native:
            only_python(broker)
        served = fast_paths(broker)
        users = users_of(broker)
        expected: list[str] = []
        frames: list[bytes] = []
        numbers: list[int] = []

        async def ask(code: int, ext: dict[str, Any], body: bytes) -> None:
            if not together:
                assert (await app.ask(code, ext, body)).code == 0
                return
            fields = signed(ext, body, "app", secret_of("app"), 479)
            numbers.append(1 << 20 | len(numbers))
            command = RemotingCommand(code, numbers[-1], 0, 479, "JAVA", ext=fields, body=body, encoding=encoding)
            frames.append(encode(command))

        for correlation, *asked in requests():
            await ask(*cast("Any", asked))
            expected.append(correlation)
            for each in usual * 3:
                await ask(*each)
        await client.stream.send_all(b"".join(frames))
        for number in numbers:
            assert (await client.reply(number)).code == 0
        assert [users.user_of("asker", each) for each in expected] == ["app"] * len(expected)
        assert len(users) == len(expected)
        times = 3 * len(expected)
        counts = Counter(served)
        if encoding is Encoding.JSON:
            assert (counts[310], counts[10]) == (times, times)
        elif native and NATIVE.is_on and together:  # binary headers are read only where some requests come together
            assert counts[310] + counts[10] > 0
        # Batches have a fast path in JSON, with the extension only.
        assert counts[320] == (times if encoding is Encoding.JSON and NATIVE.is_on else 0)


@pytest.mark.skipif(not NATIVE.is_on, reason="without the extension nothing is served together")
async def test_sends_and_ends_of_transactions_are_served_together(tmp_path: Path) -> None:
    async with broker_with(tmp_path) as (broker, _):
        for connection in broker.reactor.connections.values():
            servers = {connection.table.routes[code].grouped for code in (10, 310, 37)}
            assert len(servers) == 1
            assert None not in servers


async def test_the_sdk_over_fast_paths(tmp_path: Path) -> None:
    """A stranger has the client's id before the client has it, and a second user asks too."""
    async with running(tmp_path) as namesrv:
        address = "{}:{}".format(*namesrv.address)
        changes = {"namesrvAddr": address, "brokerIP1": "127.0.0.1"}
        async with (
            broker_with(tmp_path, "app", "other", "stranger", **changes) as (broker, root),
            AsyncExitStack() as stack,
        ):
            await root.make("replier", "Topic:T Sub", "Group:G Sub", f"Topic:{REPLIES} Pub", "Topic:TBW102 Get")

            def options(name: str) -> ClientOptions:
                return ClientOptions(credentials=Credentials(name, secret_of(name)))

            asking = [
                await stack.enter_async_context(Producer("P", namesrv=address, options=options(name)))
                for name in ("app", "other")
            ]
            strangers = [await producer(stack, broker, "stranger", each.client.id) for each in asking]
            consumer = await stack.enter_async_context(
                Consumer("G", "T", namesrv=address, start="first", options=options("replier"))
            )
            replier = await stack.enter_async_context(Producer("R", namesrv=address, options=options("replier")))
            nursery = await stack.enter_async_context(trio.open_nursery())

            async def serve() -> None:
                async for message in consumer:
                    async with message.process():
                        if message.wants_reply:
                            await replier.reply(message, b"to " + message.body)

            nursery.start_soon(serve)
            for number in range(3):
                for each in asking:
                    body = b"%d" % number
                    assert (await each.request(Message("T", body), ttl=30)).body == b"to " + body
            assert users_of(broker).user_of(asking[0].client.id, "unknown") is None
            assert len(users_of(broker)) == 6
            assert not any(one.client.asked for one in strangers)
            nursery.cancel_scope.cancel()


# the table


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class _Named:
    """A Permit that knows the user of a request."""

    def user_name(self, command: RemotingCommand) -> str:
        return command.ext_fields()["AccessKey"]


@pytest.fixture
def users(clock: ManualClock) -> RequestUsers:
    return RequestUsers(cast("Permit", _Named()), clock)


def test_first_come_first_served(users: RequestUsers, clock: ManualClock) -> None:
    users.remember("a", "1", "app")
    users.remember("a", "1", "reader")
    users.remember("b", "1", "reader")
    assert (users.user_of("a", "1"), users.user_of("b", "1")) == ("app", "reader")
    assert users.user_of("a", "2") is None
    clock.advance(SECONDS / 2)
    users.remember("a", "1", "reader")
    users.remember("a", "2", "app")
    clock.advance(SECONDS / 2)
    assert users.user_of("a", "1") is None
    assert users.user_of("a", "2") == "app"
    users.remember("a", "1", "reader")
    assert users.user_of("a", "1") == "reader"


def test_ids_are_not_mixed_up_and_take_no_more_memory_if_they_are_long(users: RequestUsers) -> None:
    users.remember("ab", "c", "app")
    assert users.user_of("a", "bc") is None
    users.remember("\ud800", "x" * 32_000, "app")
    assert users.user_of("\ud800", "x" * 32_000) == "app"
    assert {len(key) for key in users._users} == {16}


def test_a_users_many_requests_drive_out_his_own_only(users: RequestUsers) -> None:
    users.remember("a", "1", "app")
    for number in range(MOST_OF_USER + 2):
        users.remember("s", str(number), "stranger")
    assert len(users) == MOST_OF_USER + 1
    assert users.user_of("a", "1") == "app"
    assert [users.user_of("s", str(number)) for number in range(3)] == [None, None, "stranger"]


def test_over_the_limit_of_all_who_has_most_loses_the_oldest(
    users: RequestUsers, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_users, "MOST", 10)
    users.remember("a", "1", "app")
    for number in range(5):
        users.remember("m", str(number), "much")
    for number in range(4):
        users.remember("s", str(number), "some")
    users.remember("n", "1", "new")
    assert len(users) == 10
    assert [users.user_of("m", str(number)) for number in range(2)] == [None, "much"]
    assert (users.user_of("a", "1"), users.user_of("n", "1"), users.user_of("s", "0")) == ("app", "new", "some")
    clock.advance(SECONDS / 2)
    users.remember("a", "2", "app")
    clock.advance(SECONDS / 2)
    for number in range(2, 10):
        users.remember("n", str(number), "new")
    users.remember("n", "10", "new")  # the tenth: what has ended goes first
    assert (users.user_of("a", "2"), users.user_of("n", "10")) == ("app", "new")
    assert set(users._of) == {"app", "new"}
    clock.advance(SECONDS)
    assert users.user_of("a", "2") is None
    users.remember("x", "1", "new")
    assert (len(users), set(users._of)) == (1, {"new"})


def send(code: int, ext: dict[str, Any], body: bytes = b"") -> RemotingCommand:
    fields = {name: str(value) for name, value in (ext | {"AccessKey": "app"}).items() if value is not None}
    return RemotingCommand(code, 1, ext=fields, body=body)


@pytest.mark.parametrize(
    "command",
    [
        send(37, {"properties": properties_text(request())}),
        send(325, send_ext("T", request())),
        send(310, send_ext("T")),
        send(310, send_ext("T", USUAL)),
        send(310, send_ext("T", {"KEYS": "REPLY_TO_CLIENT"})),
        send(310, send_ext("T", {"REPLY_TO_CLIENT": "asker"})),
        send(310, send_ext("T", request(""))),
        send(310, send_ext("T", request(client_id=""))),
        send(310, send_ext("T", request() | {"LONG": "x" * 40_000})),
        send(320, send_ext("T", request(), batch="true"), batch(USUAL)),
        send(320, send_ext("T", batch="true"), b"REPLY_TO_CLIENT"),
        send(320, send_ext("T", batch="true"), b""),
    ],
)
def test_what_is_no_request(users: RequestUsers, command: RemotingCommand) -> None:
    users.check(cast("Connection", None), command)
    assert len(users) == 0


def test_a_header_that_cannot_be_read(users: RequestUsers) -> None:
    with pytest.raises(RemotingError, match="the header field e is not a whole number"):
        users.check(cast("Connection", None), send(RequestCode.SEND_MESSAGE_V2, send_ext("T", request(), queue_id="x")))
    assert len(users) == 0
