"""64,000 fuzzed authentication fields: a request is served only with a right signature, and then always if permitted.

Three ways are looked at: the full path, and the fast path in Python and in the native extension. What has to happen is
decided by Referee. TRIMQ_FUZZ_SEED gives another seed.
"""

import os
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from tests.remoting.auth.stores import MemoryFile, in_clear, rules
from tests.remoting.fuzz.fields import SECRETS, Fields
from tests.remoting.fuzz.referee import Judgement, Referee
from trimq.protocol.auth.model import Action, Decision, PolicyEntry, Resource, UserChange, UserStatus, UserType
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import decode
from trimq.protocol.headers.offset import GetMaxOffsetRequestHeader
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.protocol.headers.send import SendMessageRequestHeader, SendMessageRequestHeaderV2
from trimq.protocol.native import NATIVE, NativeExtension
from trimq.protocol.typed_request import NOT_DECODED, HeadedRequest, headed_decoder
from trimq.remoting.auth.access import Access
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.authenticator import Authenticator
from trimq.remoting.auth.authorizer import Authorizer
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.fast_access import FastAccess
from trimq.remoting.auth.replay_guard import ReplayGuard
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import Span

PARTS: Final = 8
CASES: Final = 8_000
"""Of each part."""
SEED: Final = int(os.environ.get("TRIMQ_FUZZ_SEED", "29"))

HEADERS: Final[dict[int, Any]] = {
    310: headed_decoder(SendMessageRequestHeaderV2),
    10: headed_decoder(SendMessageRequestHeader),
    11: headed_decoder(PullMessageRequestHeader),
    30: headed_decoder(GetMaxOffsetRequestHeader),
}
CONNECTION: Final = cast("Connection", SimpleNamespace(peer=("127.0.0.1", 1), peer_text="127.0.0.1:1", tls=None))


def entry(resource: str, *actions: Action) -> PolicyEntry:
    return PolicyEntry(Resource.parse(resource), actions, Decision.ALLOW, ())


async def users() -> AuthStore:
    store = AuthStore(MemoryFile(), in_clear())
    await store.load()
    for name, secret in SECRETS.items():
        status = UserStatus.DISABLE if name == "off" else UserStatus.ENABLE
        kind = UserType.SUPER if name in ("root", "off") else UserType.NORMAL
        await store.create_user(name, UserChange(secret, kind, status))
    for name in ("all", "strict"):
        await store.write_acl(rules(name, entry("*", Action.ALL)))
    for name in ("app", "Jürgen"):
        await store.write_acl(rules(name, entry("Topic:T", Action.PUB)))
    consumes = (entry("Topic:T", Action.SUB, Action.GET), entry("Group:G", Action.SUB, Action.GET))
    await store.write_acl(rules("reader", *consumes))
    return store


class Ways:
    """The three ways a request can take, with the same users."""

    def __init__(self, store: AuthStore, clock: ManualClock) -> None:
        guard = ReplayGuard(clock, required=["strict"])
        clock.advance(0.001)  # what is as old as the guard is refused
        who = Authenticator(store, clock, replay_guard=guard, failures_per_minute=1 << 60)
        self.store = store
        self.access = Access(
            config=AuthConfig(authentication_enabled=True, authorization_enabled=True),
            cluster="own",
            store=store,
            authenticator=who,
            authorizer=Authorizer(store),
            log_budget=LogBudget(clock),
        )
        natives = [NativeExtension(None, "a test")] + ([NATIVE] if NATIVE.is_on else [])
        self.fast = [
            FastAccess(
                store=store,
                authenticator=who,
                authorizer=Authorizer(store),
                unsigned=frozenset(),
                needless=frozenset(),
                administration=self.access._administration,
                native=native,
            )
            for native in natives
        ]
        for name in ("root", "all", "app", "Jürgen", "reader", "strict"):
            user = store.user(name)
            assert user is not None
            for fast in self.fast:
                fast.known(user)

    def lets(self, fast: FastAccess, frame: bytes, typed: HeadedRequest[Any] | None) -> set[bool]:
        """What one fast path says: frame by frame, in a round, and with a decoded header."""
        view = memoryview(frame)
        (span,), _ = fast.verify_spans(view, [Span(CONNECTION, 0, len(frame), 1)], 1)
        assert (span.begin, span.end, span.most) in ((0, len(frame), 1), (0, 0, 0))
        found = {bool(fast.verify_frame(CONNECTION, view)), span.most > 0}
        if typed is not None:
            found.add(bool(fast.verify(CONNECTION, typed.code, typed)))
        return found

    def commits(self, frame: bytes) -> bool:
        """Record a request with a stamp as served by a fast path; False if none may serve it, or it has no stamp."""
        commit = self.fast[-1].verify_frame(CONNECTION, memoryview(frame))
        if isinstance(commit, bool):
            return False
        commit()
        return True

    def serves(self, command: RemotingCommand) -> bool:
        """What the full path says. Any other exception than RemotingError fails the test."""
        try:
            self.access.check(CONNECTION, command)
        except RemotingError:
            return False
        return True


def typed_of(frame: bytes) -> HeadedRequest[Any] | None:
    """The request as fast paths decode it: by its code, which the front of the header names."""
    body_at = 8 + int.from_bytes(frame[5:8], "big")
    front = frame[16:].split(b",", 1)[0]
    decoder = HEADERS.get(int(front)) if frame[4] == 0 and frame[8:16] == b'{"code":' and front.isdigit() else None
    if decoder is None:
        return None
    try:
        typed: HeadedRequest[Any] = decoder(memoryview(frame)[8:body_at])
    except NOT_DECODED:
        return None
    if typed.code != int(front) or typed.flag:
        return None
    typed.body = memoryview(frame)[body_at:]
    return typed


def only_the_signature(judged: Judgement) -> bool:
    """Whether a request that names a user has a signature that looks like one, and is wrong."""
    if judged.read is None or judged.signature:
        return False
    fields = judged.read.fields
    return fields.get("AccessKey") in SECRETS and len(fields.get("Signature", "")) == 28


def look(ways: Ways, frame: bytes, judged: Judgement, source: random.Random, counts: Counter[str]) -> None:
    """Compare the three ways with what the referee says."""
    typed_first, fast_first = source.random() < 0.5, source.random() < 0.5
    typed = typed_of(frame)
    fast = [ways.lets(one, frame, typed) for one in ways.fast]
    try:
        command = typed.command(typed.head) if typed is not None and typed_first else decode(memoryview(frame)[4:])
    except FrameError:
        served = False  # the connection is closed
    else:
        committed = fast_first and ways.commits(frame)
        served = ways.serves(command)
        if committed:
            assert not served, "served twice"
            served = True
            counts["stamps of fast paths"] += 1
    # What reads the frame behind a fast path leaves invalid numbers to the full path, which refuses them before.
    may = served or (judged.served is None and judged.signature)
    assert may or not any(True in said for said in fast), f"fast {fast}, the full path refuses"
    assert not served or judged.signature, "served without a right signature"
    assert judged.served is None or served == judged.served, f"served {served}"
    counts["served"] += served
    counts["right signature"] += judged.signature is True
    counts["only the signature"] += only_the_signature(judged)
    counts["right signature, refused"] += judged.signature is True and not served
    counts["unreadable"] += judged.read is None
    for number, said in enumerate(fast):
        counts[f"fast {number}"] += True in said


@pytest.mark.parametrize("part", range(PARTS))
async def test_fuzzed_fields(part: int) -> None:
    clock = ManualClock()
    ways = Ways(await users(), clock)
    source = random.Random(f"{SEED} fields {part}")
    fields = Fields(source, clock.wall_ms())
    referee = Referee(SECRETS, clock.wall_ms)
    counts: Counter[str] = Counter()
    for number in range(CASES):
        frame = fields.frame()
        judged = referee.judge(frame)
        try:
            look(ways, frame, judged, source, counts)
        except Exception as error:
            error.add_note(f"TRIMQ_FUZZ_SEED={SEED}, part {part}, case {number}: frame {frame[:2000]!r}, {judged}")
            raise
        counts["cases"] += 1
    # Or the test would say nothing.
    assert counts["cases"] == CASES
    shares = {name: count / CASES for name, count in counts.items()}
    assert shares["right signature"] > 0.3, shares
    assert shares["only the signature"] > 0.15, shares
    assert shares["served"] > 0.15, shares
    assert shares["right signature, refused"] > 0.1, shares
    assert all(shares[f"fast {number}"] > 0.05 for number in range(len(ways.fast))), shares
    assert 0.005 < shares["unreadable"] < 0.2, shares
    assert shares["stamps of fast paths"] > 0.005, shares
