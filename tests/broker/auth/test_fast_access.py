"""Access in front of the fast paths: that they serve, what is left to the full path, and that failures count once."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.broker.auth.signed import ROOT, User, closed_broker, signed
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from tests.remoting.auth.stores import CANARY, filled, rules
from trimq.broker.controller import BrokerController
from trimq.protocol.auth.model import MOST_RESOURCE_BYTES, Action, Decision, PolicyEntry, Resource, UserChange
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode
from trimq.protocol.headers.send import SendMessageRequestHeaderV2
from trimq.protocol.native import NATIVE, NativeExtension
from trimq.protocol.typed_request import HeadedRequest, headed_decoder
from trimq.remoting.auth import fast_access
from trimq.remoting.auth.access import Access
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.authenticator import Authenticator
from trimq.remoting.auth.authorizer import Authorizer
from trimq.remoting.auth.fast_access import FastAccess
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import Span

MESSAGE = "UNIQ_KEY\x017F0000010001AABB0000000000000001\x02"


def access_of(broker: BrokerController) -> Access:
    assert broker.context.users is not None
    return broker.context.users.access


class Looks:
    """The codes of requests that the full check has seen."""

    def __init__(self, broker: BrokerController) -> None:
        access = access_of(broker)
        self.codes: list[int] = []
        check = access.check

        def looking(connection: Connection, command: RemotingCommand) -> None:
            self.codes.append(command.code)
            check(connection, command)

        feature = access.feature
        object.__setattr__(feature, "check", looking)
        broker.gate.reconfigure()

    def take(self) -> list[int]:
        codes, self.codes = self.codes, []
        return codes


def without_extension(broker: BrokerController) -> None:
    """Verify in Python, as without the extension."""
    access_of(broker)._fast._native = NativeExtension(None, "a test")


async def burst(user: User, requests: list[tuple[int, dict[str, Any], bytes]]) -> list[RemotingCommand]:
    """Send all in one write."""
    frames = [
        encode(
            RemotingCommand(code, number, 0, 479, "JAVA", ext=signed(ext, body, user.name, user.secret, 479), body=body)
        )
        for number, (code, ext, body) in enumerate(requests, 1 << 20)
    ]
    await user.client.stream.send_all(b"".join(frames))
    return [await user.client.reply(number) for number in range(1 << 20, (1 << 20) + len(requests))]


@pytest.mark.parametrize("native", [True, False])
async def test_fast_paths_serve_a_user_who_is_known(
    tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = []
    verify_spans = FastAccess.verify_spans

    def counting(self: FastAccess, frames: memoryview, spans: Sequence[Span], most: int) -> Any:
        found = verify_spans(self, frames, spans, most)
        grouped.append(sum(span.most > 0 for span in found[0]))
        return found

    monkeypatch.setattr(FastAccess, "verify_spans", counting)
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        if not native:
            without_extension(broker)
        app = User(client, (await root.make("app", "Topic:T Pub|Sub", "Group:G Sub")).name)
        await root.ask(310, send_ext("T"), b"makes the topic")
        assert (await app.ask(11, pull_ext("T"))).code == 0
        looks = Looks(broker)
        send = send_ext("T", MESSAGE)
        batch = encode_batch([(0, b"in a batch", b"UNIQ_KEY\x017F0000010001AABB0000000000000002\x02")])
        requests = [
            (310, send, b"one"),
            (10, send_ext("T", MESSAGE, v1=True), b"two"),
            (11, pull_ext("T"), b""),
            (320, send_ext("T", batch="true"), batch),
        ]
        for request in requests:
            assert (await app.ask(*request)).code == 0
        # without the extension, batches have no fast path
        assert looks.take() == ([] if NATIVE.is_on else [320])
        for reply in await burst(app, [(310, send, b"m%d" % number) for number in range(40)]):
            assert reply.code == 0
        assert looks.take() == []
        assert (sum(grouped) > 0) == NATIVE.is_on
        # A change of users: the next request of each user goes the full path, and those after it do not.
        await root.make("more")
        assert looks.take() == [3001]
        for expected in ([310], []):
            assert (await app.ask(310, send, b"again")).code == 0
            assert looks.take() == expected


async def test_what_fast_paths_do_not_serve_is_refused_once(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        access = access_of(broker)
        app = User(client, (await root.make("app", "Topic:T Pub")).name)
        for topic in ("T", "U"):
            assert (await root.ask(310, send_ext(topic), b"makes the topic")).code == 0
        assert (await app.ask(310, send_ext("T", MESSAGE), b"known")).code == 0
        looks = Looks(broker)
        before = access._authenticator.failures
        wrong = User(client, "app", "guess")
        for _ in range(3):
            assert (await wrong.ask(310, send_ext("T", MESSAGE), b"x")).remark == "check signature failed."
        assert all(one.code == 16 for one in await burst(wrong, [(310, send_ext("T", MESSAGE), b"x")] * 12))
        assert (access._authenticator.failures - before, access.refused["authentication"]) == (15, 15)
        assert len(looks.take()) == 15
        mixed = [(310, send_ext("U" if number % 3 == 2 else "T", MESSAGE), b"x") for number in range(30)]
        assert [one.code for one in await burst(app, mixed)] == [0, 0, 16] * 10
        assert access.refused["authorization"] == 10
        assert looks.take() == [310] * 10


async def test_too_many_wrong_signatures_end_the_fast_paths_of_an_address(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        authenticator = access_of(broker)._authenticator
        send = send_ext("T", MESSAGE)
        assert (await root.ask(310, send, b"x")).code == 0
        wrong = User(client, ROOT, "guess")
        for _ in range(3):
            await burst(wrong, [(310, send, b"x")] * 100)
        assert (authenticator.failures, authenticator.limited) == (300, 0)
        assert "too many requests with this user's name" in str((await root.ask(310, send, b"x")).remark)
        assert all(one.code == 16 for one in await burst(root, [(310, send, b"x")] * 20))
        assert (authenticator.failures, authenticator.limited) == (321, 21)


async def test_the_end_of_a_transaction_of_another_topic(tmp_path: Path) -> None:
    """The header names a topic of the user; the half is of another one: only the full path reads it."""
    half = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": "7F0000010001AABB0000000000000003"}
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        for topic in ("T", "U"):
            assert (await root.ask(310, send_ext(topic), b"makes the topic")).code == 0
        app = User(client, (await root.make("app", "Topic:T Pub")).name)
        assert (await app.ask(310, send_ext("T", MESSAGE), b"known")).code == 0
        sent = await root.ask(310, send_ext("U", half, sys_flag=4), b"half")
        assert sent.code == 0
        fields = sent.ext_fields()
        end = {
            "topic": "T",
            "producerGroup": "P",
            "tranStateTableOffset": fields["queueOffset"],
            "commitLogOffset": int(fields["msgId"][16:], 16),
            "commitOrRollback": 8,
            "msgId": half["UNIQ_KEY"],
        }
        replies = await burst(app, [(310, send_ext("T", MESSAGE), b"x")] * 10 + [(37, end, b"")])
        assert [one.code for one in replies] == [0] * 10 + [16]
        assert "Topic:U" in str(replies[-1].remark)
        looks = Looks(broker)
        replies = await burst(root, [(310, send_ext("T", MESSAGE), b"x")] * 10 + [(37, end, b"")])
        assert [one.code for one in replies] == [0] * 11
        assert looks.take() == [] or not NATIVE.is_on  # a Super may end it on the fast path


# the verifier alone


def connection(address: str = "127.0.0.1") -> Connection:
    return cast("Connection", SimpleNamespace(peer=(address, 1), tls=None))


def verifier(store: AuthStore, **more: Any) -> FastAccess:
    codes: Any = dict.fromkeys(("unsigned", "needless", "administration"), frozenset())
    parts = {"authenticator": Authenticator(store, ManualClock()), "authorizer": Authorizer(store)}
    return FastAccess(store=store, **{**parts, **codes, **more})


def request(
    topic: str = "T", name: str = "me", secret: str = CANARY, *, stamp: dict[str, str] | None = None
) -> tuple[bytes, HeadedRequest[Any]]:
    ext = signed(send_ext(topic) | (stamp or {}), b"x", name, secret, 479)
    frame = encode(RemotingCommand(310, 1, 0, 479, "JAVA", ext=ext, body=b"x"))
    decoded = headed_decoder(SendMessageRequestHeaderV2)(memoryview(frame)[8:-1])
    decoded.body = memoryview(frame)[-1:]
    return frame, decoded


def lets(fast: FastAccess, *args: Any, code: int = 310, address: str = "127.0.0.1", **more: Any) -> bool:
    """Whether it lets a request through; by all three ways the same, unless the code has no frames."""
    frame, decoded = request(*args, **more)
    conn = connection(address)
    found = bool(fast.verify(conn, code, decoded))
    if code == 310:
        assert bool(fast.verify_frame(conn, memoryview(frame))) == found
        spans, _ = fast.verify_spans(memoryview(frame), [Span(conn, 0, len(frame), 1)], 1)
        assert [(span.end, span.most) for span in spans] == [(len(frame), 1) if found else (0, 0)]
    return found


def native_and_python() -> list[NativeExtension]:
    return [NATIVE, NativeExtension(None, "a test")]


ALLOW = PolicyEntry(Resource.topic("T"), (Action.PUB,), Decision.ALLOW, ())


@pytest.mark.parametrize("native", native_and_python())
async def test_users_and_policies_of_now(native: NativeExtension) -> None:
    store, _ = await filled()
    fast = verifier(store, native=native)

    def known(name: str) -> None:
        user = store.user(name)
        assert user is not None
        fast.known(user)
        fast.known(user)

    assert not lets(fast)
    known("me")
    assert not lets(fast)
    await store.write_acl(rules("me", ALLOW))
    assert not lets(fast)  # no user is known after a change
    known("me")
    known("root")
    assert lets(fast)
    assert not lets(fast, "U")
    assert not lets(fast, "T", "me", "guess")
    assert not lets(fast, "", "me")
    assert lets(fast, "U", "root", "root-" + CANARY)
    await store.update_user("me", UserChange("another password"))
    known("me")
    assert not lets(fast)
    assert lets(fast, "T", "me", "another password")
    await store.write_acl(rules("me", PolicyEntry(Resource.topic("T"), (Action.PUB,), Decision.ALLOW, ("10.0.0.1",))))
    known("me")
    assert not lets(fast, "T", "me", "another password")
    assert lets(fast, "T", "me", "another password", address="10.0.0.1")
    await store.delete_user("me")
    assert not lets(fast, "T", "me", "another password", address="10.0.0.1")


async def test_codes() -> None:
    store, _ = await filled()
    await store.write_acl(rules("me", ALLOW))
    me = store.user("me")
    assert me is not None
    send = frozenset({310})
    closed = verifier(store, administration=send)
    needless = verifier(store, needless=send)
    without = verifier(store, authorizer=None)
    unsigned = verifier(store, unsigned=send)
    usual = verifier(store)
    for fast in (closed, needless, without, usual):
        fast.known(me)
    assert not lets(closed)
    assert (lets(needless, "U"), lets(without, "U"), lets(usual, "U"), lets(usual)) == (True, True, False, True)
    assert not lets(needless, "U", "me", "guess")
    assert unsigned.verify(connection(), 310, request("T", "me", "guess")[1])
    assert not lets(usual, code=RequestCode.HEART_BEAT)  # its needs are in the body
    assert not lets(usual, code=RequestCode.SEND_MESSAGE)  # the header is of another code


@pytest.mark.parametrize("native", native_and_python())
async def test_an_address_with_too_many_wrong_signatures(native: NativeExtension) -> None:
    store, _ = await filled()
    authenticator = Authenticator(store, ManualClock(), failures_per_minute=1)
    fast = verifier(store, authorizer=None, authenticator=authenticator, native=native)
    me = store.user("me")
    assert me is not None
    fast.known(me)
    assert lets(fast)
    with pytest.raises(RemotingError):
        authenticator.verify({"AccessKey": "me"}, b"", 479, "127.0.0.1", 310)
    assert not lets(fast)
    assert lets(fast, address="127.0.0.2")


async def test_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = await filled()
    await store.write_acl(rules("me", ALLOW))
    fast = verifier(store)
    me = store.user("me")
    assert me is not None
    fast.known(me)
    monkeypatch.setattr(fast_access, "MOST_DECISIONS", 3)
    for number in range(10):
        assert not lets(fast, f"U{number}")
        assert lets(fast)
        assert len(fast._decisions) <= 3


@pytest.mark.parametrize("code", [11, 310])
async def test_long_names_are_not_kept(code: int) -> None:
    # Else each request could leave a name of kilobytes in the table, of topics that the user may not even send to.
    store, _ = await filled()
    everything = PolicyEntry(Resource.parse("*"), (Action.ALL,), Decision.ALLOW, ())
    await store.write_acl(rules("me", everything))
    fast = verifier(store)
    me = store.user("me")
    assert me is not None
    fast.known(me)
    for size, kept in ((MOST_RESOURCE_BYTES, 1), (MOST_RESOURCE_BYTES + 1, 1), (1 << 20, 1)):
        name = "a" * size
        assert fast._may(0, code, name if code == 310 else ("T", name), "127.0.0.1")
        assert len(fast._decisions) == kept


class Faulty:
    """Signers of a broken extension."""

    def __init__(self, *_: Any) -> None:
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            if self.fails == name:
                raise RuntimeError("broken")
            if self.fails == "other":
                raise ValueError("a mistake")
            return 0

        return call


@pytest.mark.parametrize("what", ["add", "signer", "asked", "round"])
async def test_after_a_fault_of_the_extension_python_verifies(what: str) -> None:
    store, _ = await filled()
    await store.write_acl(rules("me", ALLOW))
    module = SimpleNamespace(NativeFault=RuntimeError, Signers=Faulty)
    native = NativeExtension(cast("Any", module))
    fast = verifier(store, native=native)
    me = store.user("me")
    assert me is not None
    frame, decoded = request()
    calls: dict[str, Callable[[], Any]] = {
        "signer": lambda: fast.verify(connection(), 310, decoded),
        "asked": lambda: fast.verify_frame(connection(), memoryview(frame)),
        "round": lambda: fast.verify_spans(memoryview(frame), [Span(connection(), 0, len(frame), 1)], 1)[0][0].most > 0,
        "add": partial(fast.known, me),
    }
    cast("Faulty", fast._signers).fails = "other"
    with pytest.raises(ValueError, match="a mistake"):
        calls[what]()
    assert native.is_on
    cast("Faulty", fast._signers).fails = what
    assert not calls[what]()
    assert (native.is_on, native.status) == (False, "python (a fault)")
    assert not lets(fast)
    fast.known(me)
    assert lets(fast)
