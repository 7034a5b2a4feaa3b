"""Requests with a stamp on fast paths: which are let through, and that each is served once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.broker.auth.signed import closed_broker
from tests.broker.auth.test_fast_access import (
    MESSAGE,
    Looks,
    connection,
    lets,
    native_and_python,
    request,
    verifier,
    without_extension,
)
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from tests.remoting.auth.stores import CANARY, filled
from trimq.protocol.auth.stamp import STAMP, stamp_text
from trimq.protocol.command import RemotingCommand
from trimq.protocol.native import NATIVE, NativeExtension
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.authenticator import Authenticator
from trimq.remoting.auth.replay_guard import REMEMBERED, ReplayError, ReplayGuard
from trimq.remoting.client.credentials import Credentials, Signer
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.handlers import Span


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("required", ["", "all"])
async def test_fast_paths_serve_requests_with_a_stamp(tmp_path: Path, native: bool, required: str) -> None:
    more = {"authRequireReplayProtection": required} if required else {}
    async with closed_broker(tmp_path) as (_, root):
        secret = (await root.make("app", "Topic:T Pub|Sub", "Group:G Sub")).secret
    async with closed_broker(tmp_path, **more) as (broker, _), WireClient.connect(broker.endpoint) as client:
        if not native:
            without_extension(broker)
        signer = Signer(Credentials("app", secret))
        number = 0

        async def ask(*requests: tuple[int, dict[str, Any], bytes], times: int = 1) -> list[int]:
            nonlocal number
            begin, number = number, number + times * len(requests)
            commands = [
                RemotingCommand(code, begin + at, 0, 479, "PYTHON", ext=_texts(ext), body=body)
                for at, (code, ext, body) in enumerate(requests * times)
            ]
            await client.stream.send_all(b"".join(map(signer.encode, commands)))
            return [(await client.reply(one)).code for one in range(begin, number)]

        send = send_ext("T", MESSAGE)
        assert await ask((310, send, b"makes the topic")) == [0]
        assert await ask((11, pull_ext("T"), b"")) == [0]
        looks = Looks(broker)
        for _ in range(5):
            assert await ask((310, send, b"one")) == [0]
            assert await ask((11, pull_ext("T"), b"")) == [0]
        assert await ask((310, send, b"m"), times=40) == [0] * 40
        assert looks.take() == []
        # The first request of another sender takes the full path.
        signer = Signer(Credentials("app", secret))
        assert await ask((310, send, b"m"), times=40) == [0] * 40
        assert looks.take() == [310]


def _texts(ext: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in ext.items() if value is not None}


# the verifier alone


class Stamps:
    """A verifier with its guard and its clock, and stamps of senders that the full path has seen once."""

    def __init__(self, store: AuthStore, native: NativeExtension = NATIVE, *, required: Sequence[str] = ()) -> None:
        self.store = store
        self.clock = ManualClock()
        self.guard = ReplayGuard(self.clock, required=required)
        self.clock.advance(1)
        self.authenticator = Authenticator(store, self.clock, replay_guard=self.guard)
        self.fast = verifier(store, authorizer=None, authenticator=self.authenticator, native=native)

    def user(self, name: str) -> Any:
        found = self.store.user(name)
        assert found is not None
        return found

    def stamp(self, number: int, sender: str = "A" * 16, *, code: int = 310, ago: int = 0) -> dict[str, str]:
        return {STAMP: stamp_text(code, self.clock.wall_ms() - ago * 1000, sender, number)}

    def known(self, name: str = "me", *senders: str) -> None:
        """The full path has served a request of each sender of a user, with the number 1."""
        for sender in senders or ["A" * 16]:
            self.full(name, self.stamp(1, sender))
        self.fast.known(self.user(name))

    def full(self, name: str, stamp: dict[str, str]) -> None:
        """Check a stamp as the full path does."""
        self.guard.check(self.user(name), 310, stamp[STAMP].encode())

    def lets(self, stamp: dict[str, str], **more: Any) -> bool:
        return lets(self.fast, stamp=stamp, **more)

    def round(self, *connections: Sequence[dict[str, str]]) -> tuple[list[int], Callable[[Any], None]]:
        """Look at the frames of each connection, and return how many of each may be served, and the commit."""
        frames, spans = bytearray(b"xyz"), []
        for own in connections:
            begin = len(frames)
            for stamp in own:
                frames += request(stamp=stamp)[0]
            spans.append(Span(connection(), begin, len(frames), 99))
        found, commit = self.fast.verify_spans(memoryview(frames), spans, 99)
        assert commit is not None
        # A span that was not shortened is the one that was given.
        return [
            len(own) if one is span else one.most for one, span, own in zip(found, spans, connections, strict=True)
        ], commit


@pytest.mark.parametrize("native", native_and_python())
async def test_a_stamped_request_is_let_through_as_long_as_it_was_not_served(native: NativeExtension) -> None:
    made = Stamps((await filled())[0], native)
    made.known()
    stamp = made.stamp(2)
    for _ in range(3):
        assert made.lets(stamp)  # a look changes nothing
    commit = made.fast.verify(connection(), 310, request(stamp=stamp)[1])
    assert callable(commit)
    commit()
    assert not made.lets(stamp)
    with pytest.raises(ReplayError, match="received before"):
        made.full("me", stamp)
    commit = made.fast.verify_frame(connection(), memoryview(request(stamp=made.stamp(3))[0]))
    assert callable(commit)
    commit()
    assert not made.lets(made.stamp(3))
    # The full path knows what it has served, too.
    made.full("me", made.stamp(4))
    assert not made.lets(made.stamp(4))
    assert made.lets(made.stamp(5))


@pytest.mark.parametrize("native", native_and_python())
async def test_stamps_that_are_left_to_the_full_path(native: NativeExtension) -> None:
    """It says what is wrong with them. A stamp is known by the signed text, whatever the field's name is."""
    made = Stamps((await filled())[0], native)
    made.known()
    stamp = made.stamp(2)[STAMP]
    assert made.lets({STAMP: stamp})
    assert made.lets({"!": stamp[:3], "!!": stamp[3:]})
    assert made.lets({"zz": made.stamp(1)[STAMP]})  # this is none
    for refused in (
        made.stamp(1),
        made.stamp(2, code=10),
        made.stamp(2, ago=1),  # from before the start
        made.stamp(2, ago=-301),
        {STAMP: stamp[:-1]},
        {"!": made.stamp(1)[STAMP][:3], "!!": made.stamp(1)[STAMP][3:]},
    ):
        assert not made.lets(refused)
        with pytest.raises(ReplayError):
            made.full("me", {STAMP: "".join(refused.values())})
    assert not made.lets(made.stamp(1, "B" * 16))  # the full path makes space for a sender
    made.full("me", made.stamp(1, "B" * 16))
    made.clock.advance(301)
    assert made.lets(made.stamp(2))
    assert not made.lets({STAMP: stamp})
    with pytest.raises(ReplayError, match="behind the server's"):
        made.full("me", {STAMP: stamp})
    # Of another user with the same sender.
    made.fast.known(made.user("root"))
    assert not made.lets(made.stamp(2), name="root", secret="root-" + CANARY)


async def test_a_sender_that_was_forgotten() -> None:
    store, _ = await filled()
    made = Stamps(store)
    made.guard._most = 2
    made.known("me", "A" * 16)
    made.clock.advance(10)
    stamp = made.stamp(2)
    found = made.fast.verify(connection(), 310, request(stamp=stamp)[1])
    assert callable(found)
    for number in range(2):
        made.full("me", made.stamp(1, f"{number:016}"))
    assert not made.lets(made.stamp(2))  # A is forgotten
    # Nothing comes between a look and its commit; if it did, the request would be served once all the same.
    found()
    with pytest.raises(ReplayError):
        made.full("me", stamp)
    assert made.guard.senders == 2
    # And the floor of this user counts on fast paths.
    assert not made.lets(made.stamp(2, "0" * 15 + "1"))
    made.clock.advance(0.001)
    assert made.lets(made.stamp(2, "0" * 15 + "1"))
    assert not made.lets(made.stamp(3, "0" * 15 + "1", ago=1))


@pytest.mark.parametrize("native", native_and_python())
async def test_a_stamped_frame_is_let_through_once_in_a_round(native: NativeExtension) -> None:
    made = Stamps((await filled())[0], native)
    made.known()
    two, three, four, five = map(made.stamp, (2, 3, 4, 5))
    assert made.round([two, three], [four, two, five])[0] == [2, 1]
    assert made.round([two, three, two, five], [five, four])[0] == [2, 2]
    assert made.round([{}, two, {}, made.stamp(1), {}], [{}, two])[0] == [3, 1]
    found, commit = made.round([two, {}, three], [{}, four, {}])
    assert found == [3, 3]
    commit([(2, 0), (1, 0)])
    assert [made.lets(stamp) for stamp in (two, three, four, five)] == [False, True, True, True]
    found, commit = made.round([three], [four, {}])
    commit(None)  # what was served is unknown
    assert [made.lets(stamp) for stamp in (two, three, four, five)] == [False, False, False, True]
    # What its order makes too old is left, too.
    far = made.stamp(5 + REMEMBERED)
    assert made.round([far], [five, {}])[0] == [1, 0]
    assert made.round([five, far])[0] == [2]
    assert made.lets(five)


@pytest.mark.parametrize("native", native_and_python())
async def test_users_whose_requests_need_a_stamp(native: NativeExtension) -> None:
    store, _ = await filled()
    made = Stamps(store, native, required=["superUsers"])
    made.known()
    made.known("root")
    root = {"name": "root", "secret": "root-" + CANARY}
    assert made.lets({})
    assert made.lets(made.stamp(2))
    assert not made.lets({}, **root)
    assert made.lets(made.stamp(2), **root)
    assert not made.lets(made.stamp(1), **root)
