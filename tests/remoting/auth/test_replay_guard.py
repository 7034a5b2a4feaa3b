"""A stamped request is served once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trimq.protocol.auth.model import User, UserType
from trimq.protocol.auth.stamp import read_stamp, stamp_text
from trimq.protocol.codes import ResponseCode
from trimq.remoting.auth.replay_guard import REMEMBERED, ReplayError, ReplayGuard
from trimq.remoting.auth.stamped_frames import StampedFrames
from trimq.remoting.runtime.clock import ManualClock

ME, YOU, ROOT = User("me", "p"), User("you", "p"), User("root", "p", UserType.SUPER)
ONE, TWO, THREE = "1" * 16, "2" * 16, "3" * 16
AGAIN = "the request was received before, or after many later ones of its sender: it is not served again."
BEFORE = "the request was made before all those that this server remembers: send it anew."


class Made:
    """A guard, and stamps by its clock."""

    def __init__(self, **options: object) -> None:
        self.clock = ManualClock()
        self.guard = ReplayGuard(self.clock, **options)  # type: ignore[arg-type] # of the test
        self.clock.advance(0.001)

    def stamp(self, number: int = 1, sender: str = ONE, *, ago: float = 0.0, code: int = 310) -> bytes:
        return stamp_text(code, self.clock.wall_ms() - round(ago * 1000), sender, number).encode() + b"me"

    def verdict(self, signed: bytes, user: User = ME, code: int = 310) -> str:
        """The text of a refusal; empty if the request is served."""
        try:
            self.guard.check(user, code, signed)
        except ReplayError as error:
            text, code = error.remark, error.code
        else:
            return ""
        is_temporary = text == BEFORE or text.startswith("the clock of this server was set back")
        assert code == (ResponseCode.SYSTEM_BUSY if is_temporary else ResponseCode.NO_PERMISSION)
        return text


def test_a_request_is_served_once_with_its_code() -> None:
    made = Made()
    signed = made.stamp(code=26)
    assert made.verdict(signed, code=3003) == "the request was made with the code 26, and not 3003."
    assert made.verdict(signed, code=26) == ""
    assert made.verdict(signed, code=26) == AGAIN
    made.clock.advance(299)
    assert made.verdict(signed, code=26) == AGAIN
    assert made.verdict(b"tmq1:310:x;") == "the field !once cannot be read."


def test_requests_of_a_sender_may_overtake_each_other() -> None:
    made = Made()
    for number in (5, 3, 4, 1, 7):
        assert made.verdict(made.stamp(number)) == ""
    for number in (5, 3, 4, 1, 7):
        assert made.verdict(made.stamp(number)) == AGAIN
    assert made.verdict(made.stamp(7 + REMEMBERED)) == ""
    assert made.verdict(made.stamp(8)) == ""
    assert made.verdict(made.stamp(8)) == AGAIN
    assert made.verdict(made.stamp(2)) == AGAIN  # further behind than is remembered
    assert made.verdict(made.stamp(6)) == AGAIN
    assert made.verdict(made.stamp(7 + 3 * REMEMBERED)) == ""
    assert made.verdict(made.stamp(7 + 3 * REMEMBERED - REMEMBERED + 1)) == ""
    assert made.verdict(made.stamp(7 + 3 * REMEMBERED - 1)) == ""
    assert made.verdict(made.stamp(10**18 - 1)) == ""
    assert made.verdict(made.stamp(10**18 - 1)) == AGAIN
    assert made.verdict(made.stamp(7 + 3 * REMEMBERED)) == AGAIN


def test_senders_and_users_count_for_themselves() -> None:
    made = Made()
    for user in (ME, YOU):
        for sender in (ONE, TWO):
            signed = made.stamp(1, sender)
            assert [made.verdict(signed, user), made.verdict(signed, user)] == ["", AGAIN]
    assert made.guard.senders == 4


def test_a_wrong_clock_is_named() -> None:
    made = Made()
    made.clock.advance(1000)
    rule = "up to 300 s are accepted (authReplayWindowSeconds)."
    late = f"behind the server's, or the request was sent so late: {rule}"
    assert made.verdict(made.stamp(1, ago=400)) == f"your clock is 400 s {late}"
    assert made.verdict(made.stamp(1, ago=300.001)) == f"your clock is 301 s {late}"
    assert made.verdict(made.stamp(1, ago=-400)) == f"your clock is 400 s ahead of the server's: {rule}"
    assert made.verdict(made.stamp(1, ago=-300.001)) == f"your clock is 301 s ahead of the server's: {rule}"
    assert made.guard.senders == 0
    assert made.verdict(made.stamp(1, ONE, ago=300)) == ""
    assert made.verdict(made.stamp(1, TWO, ago=-300)) == ""


def test_fast_paths_have_the_same_window() -> None:
    made = Made()
    assert made.verdict(made.stamp(1)) == ""  # fast paths serve known senders only
    made.clock.advance(1000)
    for ago, is_within in ((300, True), (300.001, False), (-300, True), (-300.001, False)):
        stamp = read_stamp(made.stamp(2, ago=ago))
        assert stamp is not None
        assert (made.guard.look("me", 310, stamp) is not None) is is_within, ago


def test_what_was_made_before_the_start_is_refused() -> None:
    # guards restarts: the guard does not know what the process before it has served
    made = Made()
    assert made.verdict(made.stamp(ago=0.001)) == BEFORE
    assert made.verdict(made.stamp()) == ""


def test_a_server_whose_clock_is_set_back_says_so() -> None:
    # "Send it anew" would not help: a request that is made now is from before the start, by this clock.
    made = Made()
    made.clock.set_wall_ms(made.clock.wall_ms() - 3_600_000)
    assert made.verdict(made.stamp()) == (
        "the clock of this server was set back: for another 3600 s, or until it is started again, it serves no "
        "requests that say when they were made."
    )
    made.clock.advance(3600)
    assert made.verdict(made.stamp()) == ""


@pytest.mark.parametrize(
    ("required", "refused"),
    [
        ([], []),
        (["me"], ["me"]),
        (["superUsers"], ["root"]),
        (["superUsers", "you"], ["you", "root"]),
        (["all"], ["me", "you", "root"]),
    ],
)
def test_users_whose_requests_need_a_stamp(required: list[str], refused: list[str]) -> None:
    made = Made(required=required)
    found = {user.username: made.verdict(b"me", user) for user in (ME, YOU, ROOT)}
    assert [name for name, text in found.items() if text] == refused
    for name in refused:
        assert found[name].startswith(f"requests of User:{name} have to say when they were made")
    assert [made.verdict(made.stamp(), user) for user in (ME, YOU, ROOT)] == ["", "", ""]


def test_without_space_the_user_with_most_senders_is_remembered_for_less_time() -> None:
    made = Made(most_senders=3)
    first = made.stamp(1, ONE)
    assert made.verdict(first) == ""
    made.clock.advance(10)
    assert made.verdict(made.stamp(1, TWO)) == ""
    assert made.verdict(yours := made.stamp(1, ONE), YOU) == ""
    made.clock.advance(10)
    assert made.verdict(made.stamp(1, THREE)) == ""
    assert made.guard.senders == 3
    assert made.verdict(first) == BEFORE
    assert made.verdict(made.stamp(2, ONE, ago=20)) == BEFORE
    assert made.verdict(yours, YOU) == AGAIN
    assert made.verdict(made.stamp(1, "4" * 16, ago=15), YOU) == ""  # more than for him who has most
    assert made.verdict(made.stamp(2, ONE)) == ""
    assert made.guard.senders == 3


def test_a_sender_that_is_active_is_remembered_longer() -> None:
    made = Made(most_senders=2)
    assert [made.verdict(made.stamp(1, sender)) for sender in (ONE, TWO)] == ["", ""]
    made.clock.advance(1)
    busy = made.stamp(2, ONE)
    assert made.verdict(busy) == ""
    assert made.verdict(made.stamp(1, THREE)) == ""
    assert made.verdict(busy) == AGAIN  # TWO was forgotten
    assert made.verdict(made.stamp(3, ONE)) == ""


def test_what_fast_paths_serve_counts_for_the_sender() -> None:
    made = Made(most_senders=2)
    assert [made.verdict(made.stamp(1, sender)) for sender in (ONE, TWO)] == ["", ""]
    made.clock.advance(1)
    busy = made.stamp(2, ONE)
    stamp = read_stamp(busy)
    assert stamp is not None
    sender = made.guard.look("me", 310, stamp)
    assert sender is not None
    made.guard.record("me", sender, stamp)
    assert made.verdict(made.stamp(1, THREE)) == ""
    assert made.verdict(busy) == AGAIN  # TWO was forgotten, which was silent longer
    # With the time of what was served the sender is forgotten: nothing as old is served afterwards.
    assert made.verdict(made.stamp(1, "4" * 16)) == ""
    assert made.verdict(busy) == BEFORE
    assert made.verdict(late := made.stamp(2, "4" * 16, ago=0)) == BEFORE
    assert made.guard.look("me", 310, read_stamp(late) or stamp) is None


def test_senders_whose_requests_are_too_old_are_forgotten() -> None:
    made = Made()
    for number in range(50):
        assert made.verdict(made.stamp(1, f"{number:016}")) == ""
    old = made.stamp(1, "0" * 16)
    made.clock.advance(301)
    for number in range(50, 80):
        assert made.verdict(made.stamp(1, f"{number:016}"), YOU if number % 2 else ME) == ""
    assert made.guard.senders <= 32
    # A clock that is set back does not make it new: it is known to be forgotten.
    made.clock.set_wall_ms(made.clock.wall_ms() - 301_000)
    assert made.verdict(old) == BEFORE


def test_a_jump_ahead_hides_nothing_that_is_new() -> None:
    made = Made()
    for number in range(1, 10):
        assert made.verdict(made.stamp(number)) == ""
    assert made.verdict(made.stamp(9 + REMEMBERED)) == ""
    for number in range(10, 9 + REMEMBERED):
        assert made.verdict(made.stamp(number)) == ""


def test_a_client_whose_clock_is_set_back() -> None:
    # guards the time up to which a sender counts: of its newest request, which need not be the last one
    made = Made(most_senders=1)
    made.clock.advance(100)
    newest = made.stamp(1)
    assert made.verdict(newest) == ""
    assert made.verdict(made.stamp(2, ago=50)) == ""
    assert made.verdict(made.stamp(1, TWO)) == ""  # now ONE is forgotten
    assert made.verdict(newest) == BEFORE


def test_a_user_with_many_clients_whose_clocks_are_wrong_shuts_out_only_himself() -> None:
    # guards against users who make a floor in the future, which would count for all when they are gone
    made = Made(most_senders=2)
    made.clock.advance(1000)
    assert [made.verdict(made.stamp(1, sender, ago=-290)) for sender in (ONE, TWO)] == ["", ""]
    assert made.verdict(made.stamp(1, THREE, ago=-299)) == ""
    assert made.verdict(made.stamp(2, ONE, ago=-290)) == BEFORE
    for number in range(20):
        made.clock.advance(0.001)
        assert made.verdict(made.stamp(1, f"{number:016}"), YOU) == ""
    assert made.verdict(made.stamp(1, "4" * 16), ME) == BEFORE


def test_a_user_that_is_gone_costs_nothing() -> None:
    made = Made()
    signed = made.stamp()
    assert made.verdict(signed) == ""
    made.clock.advance(301)
    for number in range(4):
        assert made.verdict(made.stamp(1, f"{number:016}"), YOU) == ""
    assert list(made.guard._users) == ["you"]
    made.clock.set_wall_ms(made.clock.wall_ms() - 301_000)
    assert made.verdict(signed) == BEFORE


class Replays(RuleBasedStateMachine):
    """Requests in any order, again, from any clock, at a server whose clock is set back and forth.

    What takes a fast path, alone or in a round, has the outcome that it has at a server without fast paths.
    """

    @initialize(most=st.integers(1, 6))
    def start(self, most: int) -> None:
        self.clock = ManualClock()
        self.most = most
        self.guard, self.full = (
            ReplayGuard(self.clock, window_seconds=10, most_senders=most) for _ in ("with fast paths", "without")
        )
        self.served: set[tuple[str, bytes]] = set()
        self.made: list[tuple[User, bytes]] = []

    @rule(
        user=st.sampled_from([ME, YOU, ROOT]),
        sender=st.integers(0, 3),
        number=st.integers(1, 30) | st.integers(1000, 1100),
        skew=st.integers(-11_000, 11_000),
    )
    def new(self, user: User, sender: int, number: int, skew: int) -> None:
        self.send(*self.make(user, sender, number, skew))

    def make(self, user: User, sender: int, number: int, skew: int) -> tuple[User, bytes]:
        time = self.clock.wall_ms() + skew
        self.made.append((user, stamp_text(310, time, f"{sender:016}", number).encode()))
        return self.made[-1]

    def of_known_senders(self, data: st.DataObject, most: int) -> list[tuple[User, bytes]]:
        """New requests of senders that were seen last, which fast paths may serve, and some that were made before."""
        found = []
        for _ in range(data.draw(st.integers(1, most))):
            user, signed = data.draw(st.sampled_from(self.made[-6:]))
            stamp = read_stamp(signed)
            assert stamp is not None
            if data.draw(st.integers(0, 3)):
                number = max(1, stamp.number + data.draw(st.sampled_from([1, 2, 3, -1, -5, REMEMBERED])))
                user, signed = self.make(user, int(stamp.sender), number, data.draw(st.sampled_from([1, 0, 0, -3000])))
            found.append((user, signed))
        return found

    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        if self.made:
            self.send(*data.draw(st.sampled_from(self.made)))

    @rule(seconds=st.floats(0.001, 15))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(change=st.integers(-30_000, 30_000))
    def set_clock(self, change: int) -> None:
        self.clock.set_wall_ms(self.clock.wall_ms() + change)

    @rule(data=st.data(), is_declined=st.booleans())
    def alone(self, data: st.DataObject, is_declined: bool) -> None:
        if not self.made:
            return
        ((user, signed),) = self.of_known_senders(data, 1)
        stamp = read_stamp(signed)
        assert stamp is not None
        sender = self.guard.look(user.username, 310, stamp)
        if sender is None or is_declined:
            self.send(user, signed)
            return
        self.guard.record(user.username, sender, stamp)
        self.was_served(user, signed)

    @rule(data=st.data())
    def together(self, data: st.DataObject) -> None:
        if not self.made:
            return
        requests = self.of_known_senders(data, 8)
        once = StampedFrames(self.guard)
        allowed = 0
        for number, (user, signed) in enumerate(requests):
            stamp = read_stamp(signed)
            assert stamp is not None
            if not once.may((0, number, 0, 0, 310, stamp), user.username):
                break
            allowed += 1
        served = data.draw(st.integers(0, allowed))
        once.commit([(served, 0)])
        for request in requests[:served]:
            self.was_served(*request)
        for request in requests[served:]:
            self.send(*request)

    def send(self, user: User, signed: bytes) -> None:
        found = []
        for guard in (self.guard, self.full):
            try:
                guard.check(user, 310, signed)
            except ReplayError as error:
                found.append(error.remark)
            else:
                found.append("")
        assert found[0] == found[1]
        if not found[0]:
            self.note(user, signed)

    def was_served(self, user: User, signed: bytes) -> None:
        """By a fast path: the full path would have served it too."""
        self.full.check(user, 310, signed)
        self.note(user, signed)

    def note(self, user: User, signed: bytes) -> None:
        assert (user.username, signed) not in self.served
        self.served.add((user.username, signed))

    @invariant()
    def is_bounded(self) -> None:
        held = [entry.senders for entry in self.guard._users.values()]
        assert self.guard.senders == sum(map(len, held)) <= self.most


Replays.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestReplays = Replays.TestCase


@given(st.lists(st.integers(1, 3000), max_size=200))
def test_each_number_is_served_once_and_new_ones_always(numbers: list[int]) -> None:
    made = Made()
    served: set[int] = set()
    for number in numbers:
        text = made.verdict(made.stamp(number))
        if number in served:
            assert text == AGAIN
        elif text:
            assert max(served) - number >= REMEMBERED
        else:
            served.add(number)
