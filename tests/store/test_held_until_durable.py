"""A log file with a half stays until what replaces the half is on the device, however old the file is."""

import pytest
import trio

from tests.crash.transactions import TOPIC, Transactions
from tests.store.builders import message
from tests.store.simdisk import Loss, SimDisk
from tests.store.stores import fill, opened
from tests.store.test_clean import Rig
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.property_text import join_properties
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC
from trimq.protocol.transaction import QUEUE, make_half


async def _prepared(transactions: Transactions) -> None:
    """A durable half in the first of several log files."""
    properties = {"UNIQ_KEY": "u"}
    make_half(properties, TOPIC, 0, "P")
    text = join_properties(properties).encode()
    assert (await transactions.put(message(b"half", TRANS_HALF_TOPIC, QUEUE, properties=text, keys=("u",)))).ok
    await fill(transactions.store, 60)
    assert await transactions.store.flush()


async def _replaced(transactions: Transactions, how: str) -> None:
    half = await transactions.half(0)
    assert half is not None
    match how:
        case "stored again":
            _, result = await transactions.service.store_again(half, 1)
        case "committed":
            result = await transactions.commit(half)
        case _:
            result = await transactions.service.expire(half)
    assert result.ok
    assert transactions.store.flushed_offset < result.physical_offset + result.size


async def _clean(store: MessageStore) -> int:
    store._clean._manual_rounds = 20
    return await store._clean.look()


async def _found(transactions: Transactions) -> tuple[int, int, int]:
    """The number of pending halves, commit records and expired halves."""
    expired = await transactions.expired()
    return len(transactions.pending()), transactions.store.max_offset(TOPIC, 0), len(expired)


@pytest.mark.parametrize("how", ["stored again", "committed", "expired"])
async def test_a_half_outlives_a_power_cut_after_it_was_replaced(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    cuts: list[SimDisk] = []
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        transactions = Transactions(store, rig.disk, rig.clock)
        await transactions.open()
        await _prepared(transactions)
        rig.age(store, 100)
        await _replaced(transactions, how)
        assert await _clean(store) == 0
        cuts.append(rig.disk.copy_after_cut(Loss.ALL))
    async with opened(cuts[0], rig.settings(), rig.clock) as store:
        transactions = Transactions(store, cuts[0], rig.clock)
        await transactions.open()
        assert await _found(transactions) == (1, 0, 0)


@pytest.mark.parametrize(
    ("how", "then"), [("stored again", (1, 0, 0)), ("committed", (0, 1, 0)), ("expired", (0, 0, 1))]
)
async def test_its_file_goes_when_the_replacement_is_durable(
    how: str, then: tuple[int, int, int], autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()
    cuts: list[SimDisk] = []
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        transactions = Transactions(store, rig.disk, rig.clock)
        await transactions.open()
        await _prepared(transactions)
        rig.age(store, 100)
        await _replaced(transactions, how)
        transactions.service.ops.write()
        assert await store.flush()
        transactions.service.settle()
        assert await _clean(store) > 0
        cuts.append(rig.disk.copy_after_cut(Loss.ALL))
    async with opened(cuts[0], rig.settings(), rig.clock) as store:
        transactions = Transactions(store, cuts[0], rig.clock)
        await transactions.open()
        assert await _found(transactions) == then
