"""The decisions: ids, elections, sets and leases, on a store in memory."""

from collections.abc import Callable, Sequence

import pytest
import trio
from structlog.testing import capture_logs

from tests.controller.groups import NAME, TTL, Group, heartbeat_header, refused
from trimq.controller.kv import Compare, Delete, Kv, KvError, Lease, Put, Snapshot
from trimq.controller.replicas_info import LeaseAnswer
from trimq.protocol.codes import ResponseCode

GIB = 1 << 30


class Between:
    """The same store; ``before_txn`` runs before each of the first transactions: what others decide meanwhile."""

    def __init__(self, kv: Kv, *before_txn: Callable[[], object]) -> None:
        self._kv = kv
        self.before_txn = list(before_txn)
        self.fails_after = -1
        """Operations after which the store does not answer any more; negative: it always does."""

    def _count(self) -> None:
        if self.fails_after == 0:
            raise KvError("cut off", sent=False)
        self.fails_after -= 1

    async def grant(self, ttl_ms: int) -> Lease:
        self._count()
        return await self._kv.grant(ttl_ms)

    async def keep(self, lease: int) -> int:
        self._count()
        return await self._kv.keep(lease)

    async def range(self, prefix: str) -> Snapshot:
        self._count()
        return await self._kv.range(prefix)

    async def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        self._count()
        if self.before_txn:
            found = self.before_txn.pop(0)()
            if found is not None:
                await found  # type: ignore[misc]
        return await self._kv.txn(compares, changes)

    async def watch(self, prefix: str, revision: int, deleted: Callable[[str], None]) -> None:
        await self._kv.watch(prefix, revision, deleted)

    async def run(self) -> None:
        await self._kv.run()

    async def close(self) -> None:
        await self._kv.close()


class TestIds:
    async def test_they_count_from_one(self) -> None:
        group = Group()
        assert await group.manager.next_broker_id(NAME) == 1
        await group.join(1)
        assert await group.manager.next_broker_id(NAME) == 2
        await group.join(2)
        assert await group.manager.next_broker_id(NAME) == 3
        assert (await group.manager.state(NAME)).address(2) == "127.0.0.1:1002"

    async def test_the_same_request_again_is_the_same_broker(self) -> None:
        group = Group()
        apply = group.manager.apply_broker_id
        await apply("c", NAME, 1, "a:1;5")
        await apply("c", NAME, 1, "a:1;5")
        assert await refused(apply("c", NAME, 1, "a:1;6")) == ResponseCode.CONTROLLER_BROKER_ID_INVALID
        assert await refused(apply("c", NAME, 0, "a:1;6")) == ResponseCode.CONTROLLER_BROKER_ID_INVALID
        assert await refused(apply("other", NAME, 2, "a:2;6")) == ResponseCode.CONTROLLER_INVALID_REQUEST
        assert await group.manager.next_broker_id(NAME) == 2

    async def test_the_id_of_a_removed_broker_is_not_given_again(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.manager.clean(NAME, [2], living=True)
        apply = group.manager.apply_broker_id
        assert await refused(apply("c", NAME, 2, "a:9;9")) == ResponseCode.CONTROLLER_BROKER_ID_INVALID
        assert await group.manager.next_broker_id(NAME) == 4
        await group.manager.clean(NAME, None, living=True)
        assert await group.manager.next_broker_id(NAME) == 4
        assert await refused(apply("c", NAME, 1, "a:9;9")) == ResponseCode.CONTROLLER_BROKER_ID_INVALID
        await apply("c", NAME, 4, "a:9;9")
        assert await group.manager.next_broker_id(NAME) == 5

    async def test_a_removed_broker_gets_its_own_id_again(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.manager.clean(NAME, [2], living=True)
        await group.manager.apply_broker_id("c", NAME, 2, "a:2;7", has_had=True)
        assert (await group.manager.state(NAME)).ids[2].check_code == "a:2;7"
        assert await group.manager.next_broker_id(NAME) == 4
        other = group.manager.apply_broker_id("c", NAME, 2, "a:9;9", has_had=True)
        assert await refused(other) == ResponseCode.CONTROLLER_BROKER_ID_INVALID, "a copy of its disk"
        await group.beat(2)
        assert await group.facts() == (1, 1, [1], 3), "it has to join the set as every other one"

    async def test_those_of_a_store_that_was_lost_come_in_any_order(self) -> None:
        group = Group()
        apply = group.manager.apply_broker_id
        for broker_id in (3, 1, 2):
            await apply("c", NAME, broker_id, f"a:{broker_id};7", has_had=True)
        state = await group.manager.state(NAME)
        assert (set(state.ids), state.next_id) == ({1, 2, 3}, 4)
        await apply("c", NAME, 4, "a:4;7")

    async def test_those_of_a_group_that_was_removed_do_not_come_back(self) -> None:
        """The master of those that came since has nothing of their logs: they would cut off all they have."""
        group = Group()
        await group.led_by(1, 2)
        await group.manager.clean(NAME, None, living=True)
        apply = group.manager.apply_broker_id
        invalid = ResponseCode.CONTROLLER_BROKER_ID_INVALID
        assert await refused(apply("c", NAME, 1, "a:1;7", has_had=True)) == invalid
        await group.join(3)
        assert (await group.manager.elect(NAME, 3)).changed
        await group.join(4)
        assert await refused(apply("c", NAME, 1, "a:1;7", has_had=True)) == invalid
        await group.manager.clean(NAME, [4], living=True)
        await apply("c", NAME, 4, "a:4;7", has_had=True)

    async def test_two_that_apply_at_once(self) -> None:
        group = Group(controllers=2)
        codes: list[object] = []

        async def apply(at: int) -> None:
            try:
                await group.managers[at].apply_broker_id("c", NAME, 1, f"a:{at};1")
                codes.append(0)
            except Exception as error:  # noqa: BLE001 - looked at below
                codes.append(getattr(error, "code", error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(apply, 0)
            nursery.start_soon(apply, 1)
        assert sorted(codes, key=str) == sorted([0, ResponseCode.CONTROLLER_BROKER_ID_INVALID], key=str)

    async def test_there_is_a_limit(self) -> None:
        group = Group()
        for number in range(1, 65):
            await group.manager.apply_broker_id("c", NAME, number, "a:1;1")
        call = group.manager.apply_broker_id("c", NAME, 65, "a:1;1")
        assert await refused(call) == ResponseCode.CONTROLLER_INVALID_REQUEST

    async def test_registration(self) -> None:
        group = Group()
        register = group.manager.register
        unknown = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        assert await refused(register(NAME, 1, "a:1", started=False)) == unknown
        await group.join(1)
        assert await refused(register(NAME, 2, "a:1", started=False)) == unknown
        found = await register(NAME, 1, "new:1", started=False)
        assert not found.changed
        assert found.state.address(1) == "new:1"
        assert (await group.manager.state(NAME)).ids[1].check_code == "127.0.0.1:1001;5", "its check code stays"


class TestElections:
    async def test_the_first_that_asks(self) -> None:
        group = Group()
        unknown = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        assert await refused(group.manager.elect(NAME, 1)) == unknown
        await group.join(1, 2)
        found = await group.manager.elect(NAME, 2)
        assert found.changed
        assert (found.state.master, found.state.epoch, found.state.members, found.state.set_epoch) == (2, 1, [2], 1)
        again = await group.manager.elect(NAME, 1)
        assert not again.changed
        assert again.state.master == 2
        assert await group.facts() == (2, 1, [2], 1)

    async def test_only_living_members_of_the_set(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.beat(3, epoch=9, max_offset=9 * GIB)
        await group.dies(1, living=(2, 3))
        found = await group.manager.elect(NAME)
        assert (found.state.master, found.state.epoch, found.state.members, found.state.set_epoch) == (2, 2, [2], 3)
        assert await group.facts() == (2, 2, [2], 3)

    async def test_no_member_is_alive(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.dies(1, 2, living=(3,))
        before = await group.facts()
        assert await refused(group.manager.elect(NAME)) == ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE
        assert await refused(group.manager.elect(NAME, 3)) == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
        assert (
            await refused(group.manager.elect(NAME, 3, designate=True)) == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
        )
        assert await group.facts() == before
        await group.beat(1)
        assert not (await group.manager.elect(NAME, 3)).changed, "the old master is back"

    @pytest.mark.parametrize(
        ("ends", "elected"),
        [
            ({2: (1, 5, None), 3: (1, 5 + 3 * GIB, None)}, 3),
            ({2: (1, 5 + 3 * GIB, None), 3: (1, 5, None)}, 2),
            ({2: (1, 5 + 2 * GIB + 1, None), 3: (1, 5, None)}, 2),
            ({2: (2, 5, None), 3: (1, 9 * GIB, None)}, 2),
            ({2: (1, 5, 7), 3: (1, 5, 3)}, 3),
            ({2: (1, 5, 3), 3: (1, 6, 7)}, 3),
            ({2: (1, 5, None), 3: (1, 5, None)}, 2),
        ],
    )
    async def test_the_order(self, ends: dict[int, tuple[int, int, int | None]], elected: int) -> None:
        group = Group()
        await group.led_by(1, 2, 3)
        for broker_id, (epoch, max_offset, priority) in ends.items():
            await group.beat(broker_id, epoch=epoch, max_offset=max_offset, priority=priority)
        await group.dies(1, living=(2, 3))
        assert (await group.manager.elect(NAME)).state.master == elected

    async def test_a_controller_that_has_just_started_hears_all_that_may_be_elected(
        self, autojump_clock: object
    ) -> None:
        group = Group(controllers=2)
        await group.led_by(1, 2, 3)
        await group.dies(1, living=(2, 3))
        new = group.managers[1]
        new.hears_until = trio.current_time() + 1.5
        await new.heartbeat(heartbeat_header(2, max_offset=99))
        new.silent.add((NAME, 2))  # its connection has closed since
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def elect() -> None:
                assert (await new.elect(NAME)).state.master == 3, "the one with the longest log"

            nursery.start_soon(elect)
            await trio.sleep(0.4)
            await new.heartbeat(heartbeat_header(3, max_offset=9))
            await trio.sleep(0.4)
            assert (await group.facts())[1] == 1
            await new.heartbeat(heartbeat_header(2, max_offset=5))
        assert trio.current_time() - began == pytest.approx(0.8, abs=0.05)

    async def test_it_does_not_wait_longer(self, autojump_clock: object) -> None:
        group = Group(controllers=2)
        await group.led_by(1, 2, 3)
        await group.dies(1, living=(2, 3))
        new = group.managers[1]
        await new.heartbeat(heartbeat_header(3, max_offset=1))
        began = trio.current_time()
        new.hears_until = began + 1.5
        assert (await new.elect(NAME)).state.master == 3
        assert trio.current_time() - began == pytest.approx(1.5, abs=0.05)

    async def test_it_waits_for_nothing_if_there_is_no_choice(self, autojump_clock: object) -> None:
        group = Group(controllers=2)
        await group.led_by(1, 2, 3)
        new = group.managers[1]
        began = trio.current_time()
        new.hears_until = began + 1.5
        assert not (await new.elect(NAME)).changed, "the master is alive"
        assert (await new.elect(NAME, without=1, among={2, 3})).state.master == 2, "their connections stand"
        assert (await new.elect(NAME, 2, designate=True)).state.master == 2
        await group.dies(1, 2, 3)
        await group.beat(2)
        assert not (await new.elect(NAME)).changed
        assert trio.current_time() == began
        group = Group(controllers=2)
        await group.led_by(1, 2)
        await group.dies(1, living=(2,))
        group.managers[1].hears_until = began + 1.5
        assert (await group.managers[1].elect(NAME)).state.master == 2, "it is the only one"
        assert trio.current_time() == began

    async def test_what_a_former_life_has_said_does_not_count(self) -> None:
        group = Group()
        await group.led_by(1, 2, 3)
        await group.dies(1, living=(2, 3))
        await group.beat(2, max_offset=5)
        await group.beat(3, max_offset=9)
        await group.manager.register(NAME, 3, "127.0.0.1:1003", started=True)
        assert (await group.manager.elect(NAME)).state.master == 2
        await group.manager.alter_sync_state_set(NAME, 2, 2, [2, 3], 3)
        await group.beat(3, max_offset=4)
        await group.beat(2, max_offset=3)
        await group.manager.elect(NAME, 3, designate=True)
        assert (NAME, 3) not in group.manager.silent

    async def test_a_start_of_a_broker_that_is_not_known_leaves_nothing(self) -> None:
        group = Group()
        await group.led_by(1)
        code = await refused(group.manager.register("other", 1, "127.0.0.1:1", started=True))
        assert code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        assert group.manager.silent == set()

    async def test_a_master_that_comes_back_while_another_is_elected(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.dies(1, living=(2,))
        kv = Between(group.kv, lambda: group.beat(1))
        found = await group.through(kv).elect(NAME)
        assert not found.changed
        assert await group.facts() == (1, 1, [1, 2], 2)

    async def test_in_place_of_one_that_has_a_lease(self) -> None:
        group = Group()
        await group.led_by(1, 2, 3)
        await group.beat(3, max_offset=9)
        elect = group.manager.elect
        assert not (await elect(NAME, without=1, among={2}, epoch=2)).changed, "another epoch"
        none = ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE
        assert await refused(elect(NAME, without=1, among={1, 9}, epoch=1)) == none
        assert await group.facts() == (1, 1, [1, 2, 3], 2)
        found = await elect(NAME, without=1, among={2}, epoch=1)
        assert found.changed, "3 has more, but it is not one of these"
        assert await group.facts() == (2, 2, [2], 3)
        assert not (await elect(NAME, without=1, among={2, 3}, epoch=1)).changed
        assert (await group.manager.state(NAME)).alive == {1, 2, 3}, "the lease of the old one goes on"

    async def test_in_place_of_one_that_starts_again_meanwhile(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        kv = Between(group.kv, lambda: group.manager._next_epoch(NAME, 1))
        found = await group.through(kv).elect(NAME, without=1, among={2}, epoch=1)
        assert not found.changed
        assert await group.facts() == (1, 2, [1, 2], 3)

    async def test_a_set_that_changes_while_another_is_elected(self) -> None:
        """The member that was chosen leaves the set: it must not be elected."""
        group = Group()
        await group.led_by(1, 2, 3)
        await group.beat(2, max_offset=9)
        await group.dies(1, living=(2, 3))
        kv = Between(group.kv, lambda: group.manager.alter_sync_state_set(NAME, 1, 1, [1, 3], 2))
        found = await group.through(kv).elect(NAME)
        assert found.changed
        assert await group.facts() == (3, 2, [3], 4)

    async def test_the_chosen_one_dies_meanwhile(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.dies(1, living=(2,))
        kv = Between(group.kv, lambda: group.clock.advance(9))
        assert await refused(group.through(kv).elect(NAME)) == ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE

    async def test_the_outcome_does_not_depend_on_what_comes_later(self) -> None:
        """The store is cut off after the decision: the election was made, and brokers have to hear of it."""
        group = Group()
        await group.led_by(1, 2)
        await group.dies(1, living=(2,))
        kv = Between(group.kv)
        kv.fails_after = 2
        found = await group.through(kv).elect(NAME)
        assert found.changed
        assert (found.state.master, found.state.epoch, found.state.members, found.state.set_epoch) == (2, 2, [2], 3)
        assert found.state.living_master == 2
        assert await group.facts() == (2, 2, [2], 3)

    async def test_many_at_once_elect_one(self) -> None:
        group = Group(controllers=3)
        await group.led_by(1, 2, 3)
        await group.dies(1, living=(2, 3))
        changed = []

        async def elect(at: int) -> None:
            # Each controller has heard of another broker.
            group.managers[at].live = {(NAME, 2 + at % 2): group.manager.live[NAME, 2]._replace(max_offset=7)}
            found = await group.managers[at].elect(NAME)
            changed.append((found.changed, found.state.master))

        async with trio.open_nursery() as nursery:
            for at in range(3):
                nursery.start_soon(elect, at)
        assert sorted(was for was, _ in changed) == [False, False, True]
        assert len({master for _, master in changed}) == 1
        assert (await group.facts())[1] == 2

    async def test_others_that_decide_all_the_time(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.dies(1, living=(2,))
        count = iter(range(1, 100))
        key = (await group.manager.state(NAME)).key("set")

        async def change() -> None:
            next(count)
            value = (await group.kv.range(key)).entries[key].value
            assert await group.kv.txn([], [Put(key, value)])

        kv = Between(group.kv, *[change] * 50)
        assert await refused(group.through(kv).elect(NAME)) == ResponseCode.SYSTEM_BUSY
        assert next(count) == 9, "eight attempts"

    async def test_designated(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        elect = group.manager.elect
        failed = ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
        assert await refused(elect(NAME, 3, designate=True)) == failed, "not in the set"
        assert await refused(elect(NAME, 9, designate=True)) == failed
        assert not (await elect(NAME, 1, designate=True)).changed
        found = await elect(NAME, 2, designate=True)
        assert found.changed
        assert await group.facts() == (2, 2, [2], 3)
        assert await refused(elect(NAME, 1, designate=True)) == failed, "the new set is the new master"


class TestUnclean:
    async def test_only_with_the_option_and_without_a_living_member(self) -> None:
        group = Group(unclean=True)
        await group.led_by(1, 2)
        await group.join(3)
        await group.beat(3, max_offset=77)
        await group.dies(1, living=(2, 3))
        assert (await group.manager.elect(NAME)).state.master == 2
        await group.dies(2, living=(3,))
        with capture_logs() as logs:
            found = await group.manager.elect(NAME)
        assert found.changed
        assert await group.facts() == (3, 3, [3], 4)
        (line,) = [line for line in logs if line["event"] == "unclean_election"]
        assert (line["elected"], line["sync_state_set"], line["log_end"]) == (3, [2], 77)

    async def test_a_member_that_comes_back_meanwhile(self) -> None:
        group = Group(unclean=True)
        await group.led_by(1, 2)
        await group.join(3)
        await group.dies(1, 2, living=(3,))
        kv = Between(group.kv, lambda: group.beat(2))
        found = await group.through(kv).elect(NAME)
        assert found.state.master == 2, "it has all that was acknowledged"

    async def test_designated(self) -> None:
        group = Group(unclean=True)
        await group.led_by(1, 2)
        await group.join(3)
        found = await group.manager.elect(NAME, 3, designate=True)
        assert found.changed
        assert await group.facts() == (3, 2, [3], 3)


class TestRestart:
    async def test_a_restarted_master_gives_way(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        found = await group.manager.register(NAME, 1, "127.0.0.1:1001", started=True)
        assert found.changed
        assert await group.facts() == (2, 2, [2], 3)

    async def test_it_leads_another_epoch_where_no_other_member_lives(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.dies(2, living=(1, 3))
        found = await group.manager.register(NAME, 1, "127.0.0.1:1001", started=True)
        assert found.changed
        assert await group.facts() == (1, 2, [1, 2], 3)

    async def test_the_other_member_dies_meanwhile(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.dies(1, living=(2,))
        kv = Between(group.kv, lambda: group.clock.advance(9))
        with capture_logs() as logs:
            found = await group.through(kv).register(NAME, 1, "127.0.0.1:1001", started=True)
        assert found.changed
        assert (found.state.master, found.state.epoch) == (1, 2)
        assert "restarted_master_stays" in {line["event"] for line in logs}

    async def test_others_and_reconnections_change_nothing(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        assert not (await group.manager.register(NAME, 2, "127.0.0.1:1002", started=True)).changed
        assert not (await group.manager.register(NAME, 1, "127.0.0.1:1001", started=False)).changed
        assert await group.facts() == (1, 1, [1, 2], 2)

    async def test_an_unclean_election_is_no_way_out(self) -> None:
        group = Group(unclean=True)
        await group.led_by(1)
        await group.join(2)
        assert (await group.manager.register(NAME, 1, "127.0.0.1:1001", started=True)).state.master == 1
        assert await group.facts() == (1, 2, [1], 2)


class TestSet:
    @pytest.mark.parametrize(
        ("master", "epoch", "members", "set_epoch", "code"),
        [
            (9, 9, [1, 2], 9, ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED),
            (9, 9, [2, 1, 1], 9, ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED),
            (2, 9, [9], 9, ResponseCode.CONTROLLER_INVALID_MASTER),
            (1, 0, [9], 9, ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH),
            (1, 2, [9], 9, ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH),
            (1, 1, [9], 1, ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH),
            (1, 1, [9], 3, ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH),
            (1, 1, [9], 2, ResponseCode.CONTROLLER_INVALID_REPLICAS),
            (1, 1, [4], 2, ResponseCode.CONTROLLER_BROKER_NOT_ALIVE),
            (1, 1, [1, 4], 2, ResponseCode.CONTROLLER_BROKER_NOT_ALIVE),
            (1, 1, [2, 3], 2, ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED),
            (1, 1, [], 2, ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED),
        ],
    )
    async def test_the_first_reason(
        self, master: int, epoch: int, members: list[int], set_epoch: int, code: ResponseCode
    ) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.manager.apply_broker_id("c", NAME, 4, "a:4;4")  # it has never sent a heartbeat
        call = group.manager.alter_sync_state_set(NAME, master, epoch, members, set_epoch)
        assert await refused(call) == code
        assert await group.facts() == (1, 1, [1, 2], 2)

    async def test_a_member_that_no_controller_hears_may_stay(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.manager.alter_sync_state_set(NAME, 1, 1, [1, 2, 3], 2)
        await group.dies(2, living=(1, 3))
        await group.manager.alter_sync_state_set(NAME, 1, 1, [1, 2], 3)
        assert await group.facts() == (1, 1, [1, 2], 4)

    async def test_a_fence_lets_what_was_asked_before_fail(self) -> None:
        """Also where the older request has been read by a controller, and is decided about later."""
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)

        async def fence() -> None:
            await group.dies(3, living=(1, 2))
            assert (await group.manager.alter_sync_state_set(NAME, 1, 1, [1, 2], 2, fence=True)).epoch == 3
            await group.beat(3)

        late = group.through(Between(group.kv, fence)).alter_sync_state_set(NAME, 1, 1, [1, 2, 3], 2)
        assert await refused(late) == ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
        assert await group.facts() == (1, 1, [1, 2], 3)

    async def test_a_fence_that_is_late_is_refused(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        await group.manager.alter_sync_state_set(NAME, 1, 1, [1, 2, 3], 2)
        fence = group.manager.alter_sync_state_set(NAME, 1, 1, [1, 2], 2, fence=True)
        assert await refused(fence) == ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
        assert await group.facts() == (1, 1, [1, 2, 3], 3)

    async def test_a_group_without_a_set(self) -> None:
        group = Group()
        failed = ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
        assert await refused(group.manager.alter_sync_state_set(NAME, 1, 1, [1], 1)) == failed
        await group.join(1)
        assert await refused(group.manager.alter_sync_state_set(NAME, 1, 0, [1], 0)) == failed

    async def test_growth_and_shrinking(self) -> None:
        group = Group()
        await group.led_by(1)
        await group.join(2, 3)
        found = await group.manager.alter_sync_state_set(NAME, 1, 1, [3, 1], 1)
        assert (found.ids, found.epoch) == ([1, 3], 2)
        assert await group.facts() == (1, 1, [1, 3], 2)
        await group.dies(3, living=(1, 2))
        assert (await group.manager.alter_sync_state_set(NAME, 1, 1, [1], 2)).epoch == 3
        assert await group.facts() == (1, 1, [1], 3)

    async def test_an_election_meanwhile(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.join(3)
        kv = Between(group.kv, lambda: group.manager.elect(NAME, 2, designate=True))
        call = group.through(kv).alter_sync_state_set(NAME, 1, 1, [1, 2, 3], 2)
        assert await refused(call) == ResponseCode.CONTROLLER_INVALID_MASTER
        assert await group.facts() == (2, 2, [2], 3)

    async def test_a_member_that_dies_meanwhile(self) -> None:
        group = Group()
        await group.led_by(1)
        await group.join(2)
        kv = Between(group.kv, lambda: group.clock.advance(9))
        call = group.through(kv).alter_sync_state_set(NAME, 1, 1, [1, 2], 1)
        assert await refused(call) == ResponseCode.CONTROLLER_BROKER_NOT_ALIVE


class TestLeases:
    async def test_the_first_and_the_next(self) -> None:
        group = Group()
        await group.join(1)
        assert (await group.beat(1)).ttl_ms == TTL
        group.clock.advance(2.9)
        assert (await group.beat(1)).ttl_ms == TTL
        group.clock.advance(2.9)
        assert (await group.manager.state(NAME)).alive == {1}
        group.clock.advance(0.2)
        assert (await group.manager.state(NAME)).alive == set()
        assert (await group.beat(1)).ttl_ms == TTL, "it is alive again"

    async def test_what_an_answer_says(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.manager.elect(NAME, 2, designate=True)
        found = await group.beat(1)
        assert (found.state.master, found.state.epoch) == (2, 2), "the old master hears of the new one"

    @pytest.mark.parametrize(
        ("timeout", "granted"), [(None, 10_000), (0, 10_000), (-5, 1000), (20, 1000), (7000, 7000)]
    )
    async def test_the_time_is_as_sent(self, timeout: int | None, granted: int) -> None:
        group = Group()
        await group.join(1)
        found = await group.manager.heartbeat(heartbeat_header(1, timeout=timeout))
        assert found.ttl_ms == granted
        group.clock.advance(granted / 1000 - 0.1)
        assert (await group.manager.state(NAME)).alive == {1}
        group.clock.advance(0.2)
        assert (await group.manager.state(NAME)).alive == set()

    async def test_who_is_not_known(self) -> None:
        group = Group()
        unknown = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        assert await refused(group.manager.heartbeat(heartbeat_header(1))) == unknown
        await group.join(1)
        assert await refused(group.manager.heartbeat(heartbeat_header(2))) == unknown
        invalid = ResponseCode.CONTROLLER_INVALID_REQUEST
        assert await refused(group.manager.heartbeat(heartbeat_header(None))) == invalid
        assert (await group.manager.state(NAME)).alive == {1}

    async def test_another_controller_is_quicker(self) -> None:
        """There is no promise for a lease of another controller: how long it lasts is not known here."""
        group = Group()
        await group.manager.apply_broker_id("c", NAME, 1, "a:1;1")
        kv = Between(group.kv, lambda: group.beat(1))
        found = await group.through(kv).heartbeat(heartbeat_header(1))
        assert found.ttl_ms == 0
        assert found.state.alive == {1}

    async def test_the_lease_is_replaced_after_its_renewal(self) -> None:
        group = Group()
        await group.join(1)

        class Replaced(Between):
            async def keep(self, lease: int) -> int:
                found = await super().keep(lease)
                key = (await group.manager.state(NAME)).key("alive/1")
                other = await group.kv.grant(TTL)
                await group.kv.txn([], [Put(key, '{"timeout_ms":3000}', other.number)])
                return found

        found: LeaseAnswer = await group.through(Replaced(group.kv)).heartbeat(heartbeat_header(1))
        assert found.ttl_ms == 0

    async def test_an_election_waits_for_the_end_of_the_lease(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        promised = (await group.beat(1)).ttl_ms
        group.clock.advance(promised / 1000 - 0.001)
        await group.beat(2)
        assert not (await group.manager.elect(NAME, 2)).changed
        group.clock.advance(0.002)
        assert (await group.manager.elect(NAME, 2)).changed


class TestClean:
    NOT_CLEANED = ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA

    async def test_what_is_alive_or_not_known_stays(self) -> None:
        group = Group()
        clean = group.manager.clean
        assert await refused(clean(NAME, None, living=True)) == self.NOT_CLEANED
        await group.led_by(1, 2)
        assert await refused(clean(NAME, [2], living=False)) == self.NOT_CLEANED
        assert await refused(clean(NAME, None, living=False)) == self.NOT_CLEANED
        assert await group.facts() == (1, 1, [1, 2], 2)

    async def test_a_slave(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.dies(2, living=(1,))
        await group.manager.clean(NAME, [2], living=False)
        assert await group.facts() == (1, 1, [1], 3)
        assert set((await group.manager.state(NAME)).ids) == {1}
        unknown = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        assert await refused(group.beat(2)) == unknown

    async def test_one_outside_the_set(self) -> None:
        group = Group()
        await group.led_by(1)
        await group.join(2)
        await group.manager.clean(NAME, [2], living=True)
        assert await group.facts() == (1, 1, [1], 1), "the set is as it was"

    async def test_the_master(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        assert await refused(group.manager.clean(NAME, [1], living=True)) == self.NOT_CLEANED, "it has a lease"
        await group.dies(1, living=(2,))
        await group.manager.clean(NAME, [1], living=False)
        assert await group.facts() == (None, 1, [2], 3)
        assert await group.manager.without_master() == [NAME]
        found = await group.manager.elect(NAME)
        assert (found.state.master, found.state.epoch, found.state.members) == (2, 2, [2])

    async def test_the_last_member_of_the_set(self) -> None:
        group = Group()
        await group.led_by(1)
        await group.join(2)
        assert await refused(group.manager.clean(NAME, [1], living=True)) == self.NOT_CLEANED
        assert await group.facts() == (1, 1, [1], 1)

    async def test_all(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        with capture_logs() as logs:
            await group.manager.clean(NAME, None, living=True)
        assert [(line["broker_ids"], line["living"]) for line in logs] == [("all", [1, 2])]
        unknown = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        assert await refused(group.beat(1)) == unknown, "so the master gets no lease any more"
        state = await group.manager.state(NAME)
        assert (state.group, state.ids, state.alive, state.set, state.master) == (None, {}, set(), None, None)
        assert await refused(group.manager.elect(NAME, 1)) == unknown
        await group.join(3)
        assert (await group.manager.elect(NAME, 3)).state.epoch == 2, "epochs go on: logs know the first one"

    async def test_a_broker_that_comes_to_life_meanwhile(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        await group.dies(2, living=(1,))
        kv = Between(group.kv, lambda: group.beat(2))
        assert await refused(group.through(kv).clean(NAME, [2], living=False)) == self.NOT_CLEANED
        assert (await group.manager.state(NAME)).alive == {1, 2}


class TestGroups:
    async def test_those_without_a_master(self) -> None:
        group = Group()
        await group.led_by(1, 2)
        assert await group.manager.without_master() == []
        await group.dies(1, 2)
        assert await group.manager.without_master() == [], "no broker is left"
        await group.beat(2)
        assert await group.manager.without_master() == [NAME]

    async def test_names_are_apart(self) -> None:
        group = Group()
        names = ["a", "a/b", "ä b", "a%2Fb", ""]
        for name in names:
            await group.manager.apply_broker_id("c", name, 1, f"{name}:1;1")
            await group.manager.heartbeat(heartbeat_header(1, name=name))
            await group.manager.elect(name, 1)
        for name in names:
            state = await group.manager.state(name)
            assert (state.ids[1].check_code, state.master, state.alive) == (f"{name}:1;1", 1, {1})
        group.clock.advance(9)
        for name in names[:3]:
            await group.manager.heartbeat(heartbeat_header(1, name=name))
        assert await group.manager.without_master() == []

    @pytest.mark.parametrize("key", ["ids/x", "set", "master", "epoch", "group", "alive/1", "next"])
    async def test_a_record_that_is_none(self, key: str) -> None:
        """It concerns its group only."""
        group = Group()
        await group.led_by(1, 2)
        await group.dies(1, living=(2,))
        root = group.config.etcd_prefix
        await group.kv.txn([], [Put(f"{root}a/{key}", "{]")])
        with capture_logs() as logs:
            assert await group.manager.without_master() == [NAME]
        assert [line["broker_name"] for line in logs if line["event"] == "controller_record_unreadable"] == ["a"]
