"""Metrics of masters and slaves."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.metrics.test_page import ON, Scrape, scrape
from tests.broker.test_ha_status import acknowledged
from tests.broker.test_replication import TOPIC, in_sync, pair
from tests.broker.wire_client import WireClient
from tests.store.replication.pairs import ASYNC_MASTER, SYNC_MASTER, serve, store_of, until
from tests.store.simdisk import SimDisk
from tests.store.stores import fill
from trimq.broker.metrics.replication import MOST_SLAVES, replication_families
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.ha_frames import encode_report
from trimq.remoting.http.metrics import text_of


async def test_a_master_and_its_slave(tmp_path: Path) -> None:
    more: dict[str, Any] = ON | {"haSendHeartbeatInterval": 100, "haHousekeepingInterval": 5000}
    async with pair(tmp_path, leader=more, **more) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC, bytes(1000))
        await in_sync(master, slave)
        end = master.context.store.appended_offset
        await acknowledged(master)
        page = await scrape(master)
        assert page.value("trimq_replication_slave_lag_bytes", slave="127.0.0.1") == 0
        roles = {sample.labels["role"]: sample.value for sample in page.families["trimq_replication_role"].samples}
        assert roles == {"ASYNC_MASTER": 1, "SYNC_MASTER": 0, "SLAVE": 0}
        assert page.value("trimq_replication_slaves") == 1
        assert page.value("trimq_replication_copies_in_sync") == 2
        assert page.value("trimq_replication_copies_needed") == 1
        assert page.value("trimq_replication_unconfirmed_bytes") == 0
        assert page.value("trimq_replication_sent_bytes_total") == end
        assert page.value("trimq_replication_slaves_refused_total") == 0
        assert page.value("trimq_replication_slave_lag_seconds", slave="127.0.0.1") == 0
        assert "trimq_replication_connected" not in page.families

        page = await scrape(slave)
        assert page.value("trimq_replication_connected") == 1
        assert page.value("trimq_replication_role", role="SLAVE") == 1
        assert page.value("trimq_replication_lag_bytes") == 0
        assert page.value("trimq_replication_lag_seconds") == 0
        assert page.value("trimq_replication_received_bytes_total") >= end + 12
        assert page.value("trimq_replication_bad_transfers_total") == 0
        assert 0 <= page.value("trimq_replication_master_silent_seconds") < 5
        assert "trimq_replication_slaves" not in page.families
        # Only the port for slaves goes: the log of the master grows on.
        view, service = slave.replication.master, master.context.store.replication.ha
        assert view is not None
        assert service is not None
        view._learned = "127.0.0.1:1"
        service.connections[0].close("a test")
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC, bytes(1000))
        replica = slave.replication.client
        assert replica is not None
        await until(lambda: replica.state().lag > 1000)
        page = await scrape(slave)
        assert page.value("trimq_replication_lag_seconds") > 0
        assert page.value("trimq_replication_connected") == 0
        assert page.value("trimq_replication_lag_bytes") == master.context.store.appended_offset - end
        page = await scrape(master)
        assert page.value("trimq_replication_sent_bytes_total") == end  # also of a connection that has ended
        assert page.count("trimq_replication_slave_lag_bytes") == 0


def page_of(store: MessageStore) -> Scrape:
    return Scrape("".join(map(text_of, replication_families(store, "a"))))


async def test_slaves_with_a_series_are_bounded_and_share_it_by_address(autojump_clock: object) -> None:
    numbers = itertools.count()
    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:

        async def two_slaves(_address: str) -> int:
            return 2

        listener = serve(nursery, master, lambda _: f"10.0.0.{next(numbers) // 2}", two_slaves)
        streams = [await listener.connect() for _ in range(2 * MOST_SLAVES + 6)]
        assert master.replication.ha is not None
        await fill(master, 10)
        service, end = master.replication.ha, master.appended_offset
        await until(lambda: len(service.connections) == len(streams))
        await streams[0].send_all(encode_report(end))
        await streams[1].send_all(encode_report(end - 10))
        await until(lambda: service.connections[0].ack_offset == end and service.connections[1].ack_offset == end - 10)
        page = page_of(master)
        assert page.value("trimq_replication_slaves") == len(streams)
        assert page.count("trimq_replication_slave_lag_bytes") == MOST_SLAVES
        assert page.count("trimq_replication_slave_lag_seconds") == MOST_SLAVES
        assert page.value("trimq_replication_slave_lag_bytes", slave="10.0.0.0") == 10
        before = page.value("trimq_replication_slave_lag_seconds", slave="10.0.0.0")
        await trio.sleep(9)
        page = page_of(master)
        after = page.value("trimq_replication_slave_lag_seconds", slave="10.0.0.0")
        assert after - before == pytest.approx(9, abs=1.1)
        nursery.cancel_scope.cancel()


async def test_what_no_slave_has_confirmed(autojump_clock: object) -> None:
    async with store_of(SimDisk(), SYNC_MASTER) as master, trio.open_nursery() as nursery:
        stream = await serve(nursery, master).connect()
        await stream.send_all(encode_report(0))
        await until(lambda: master.is_writable)
        nursery.start_soon(fill, master, 1)
        await until(lambda: master.appended_offset > 0)
        page = page_of(master)
        assert page.value("trimq_replication_copies_needed") == 2
        assert page.value("trimq_replication_unconfirmed_bytes") == master.appended_offset
        nursery.cancel_scope.cancel()
