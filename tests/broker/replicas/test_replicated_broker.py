"""Brokers whose roles are assigned: the first master, failovers, the lease, and a master that was replaced."""

import contextlib
import json
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.auth.signed import ON, User, is_refused
from tests.broker.replicas.group import NAME, QUICK, TOPIC, Replica, running_group, send
from tests.broker.wire_client import WireClient
from tests.ports import free_port
from tests.remoting.auth.user_files import following, key_file, writer
from tests.store.replication.pairs import until
from tests.store.stores import drain
from trimq.broker.config import BrokerConfig
from trimq.broker.ports import ClientPorts
from trimq.broker.replicated_broker import ReplicatedBroker
from trimq.broker.start_error import StartError
from trimq.broker.store.replication.auto_switch_client import AutoSwitchHAClient
from trimq.broker.store.replication.ha_client import TruncationNeededError
from trimq.broker.testing import configuration
from trimq.protocol.auth import model
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.config.configuration import NettyServerConfig


async def bodies(replica: Replica, queue_id: int = 0) -> list[bytes]:
    """The messages of a queue that may be read."""
    return [message.body for message in await drain(replica.controller.context.store, TOPIC, queue_id)]


async def until_has(replica: Replica, *wanted: bytes) -> None:
    """Wait until just these messages may be read."""
    with trio.fail_after(20):
        while await bodies(replica) != list(wanted):  # noqa: ASYNC110 - there is no event for it
            await trio.sleep(0.01)


async def test_the_first_broker_becomes_the_master_and_the_next_ones_its_slaves(tmp_path: Path) -> None:
    async with running_group(tmp_path, 3) as group:
        first, *others = group.replicas
        assert first.leads
        assert not any(other.leads for other in others)
        state = await group.state()
        assert (state.master, state.epoch, sorted(state.members)) == (1, 1, [1, 2, 3])
        assert await send(first, b"one") == ResponseCode.SUCCESS
        end = first.controller.context.store.appended_offset
        assert all(other.controller.context.store.appended_offset == end for other in others)
        # Clients find the master under id 0, and its slaves under the ids that they were given.
        routes = group.names.routes.live_brokers()
        assert sorted(info.broker_id for info in routes) == [0, 2, 3]
        assert await send(others[0], b"no") == ResponseCode.SERVICE_NOT_AVAILABLE


async def test_another_member_takes_over_and_the_old_master_follows_it(tmp_path: Path) -> None:
    async with running_group(tmp_path, 3) as group:
        old = group.replicas[0]
        assert await send(old, b"kept") == ResponseCode.SUCCESS
        await old.cut_short()
        new = await group.master(but=old)
        await until_has(new, b"kept")
        state = await group.state()
        assert state.epoch == 2
        assert await send(new, b"more") == ResponseCode.SUCCESS
        await old.start()
        await group.joined()
        assert not old.leads
        end = new.controller.context.store.appended_offset
        await until(lambda: old.controller.context.store.appended_offset == end)
        epochs = old.controller.context.store.replication.epochs
        assert epochs is not None
        assert [entry.number for entry in epochs.entries] == [1, 2]


async def test_what_only_the_old_master_has_is_cut_off(tmp_path: Path) -> None:
    # Its slaves hear nothing from it any more, and the controllers do not either.
    async with running_group(tmp_path, 3) as group:
        old, *others = group.replicas
        assert await send(old, b"kept") == ResponseCode.SUCCESS
        end = old.controller.context.store.appended_offset
        for other in others:
            other.controller.replication.master.address = ""  # type: ignore[union-attr]
        ha = old.controller.context.store.replication.ha
        assert ha is not None
        for connection in list(ha.connections):
            connection.close("cut off by the test")
        async with WireClient.connect(old.controller.endpoint) as client:
            reply = await client.send(TOPIC, b"unconfirmed")
        assert reply.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert old.controller.context.store.appended_offset > end
        assert await bodies(old) == [b"kept"]
        await old.cut_short()
        new = await group.master(but=old)
        assert await send(new, b"later") == ResponseCode.SUCCESS
        await old.start()
        await group.joined()
        await until_has(old, b"kept", b"later")


async def test_without_a_lease_nothing_is_acknowledged_and_nothing_more_is_read(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master = group.replicas[0]
        assert await send(master, b"one") == ResponseCode.SUCCESS
        await group.stop_controller()
        await until(lambda: not master.broker.manager.lead_holds)
        assert await send(master, b"two") == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert await bodies(master) == [b"one"]
        await group.start_controller()

        # Both leases have ended meanwhile: whichever broker is heard first may lead.
        async def goes_on() -> bool:
            leading = [replica for replica in group.replicas if replica.leads]
            if not leading or (await bodies(leading[0]))[:2] != [b"one", b"two"]:
                return False
            return await send(leading[0], b"three") == ResponseCode.SUCCESS

        with trio.fail_after(20):
            while not await goes_on():  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(0.05)


async def test_a_member_that_is_silent_is_taken_out_before_sends_go_on(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        assert await send(master, b"one") == ResponseCode.SUCCESS
        await slave.cut_short()
        assert await send(master, b"late") == ResponseCode.FLUSH_SLAVE_TIMEOUT
        await group.joined(master)
        assert await send(master, b"alone") == ResponseCode.SUCCESS
        assert (await group.state()).members == [1]
        await slave.start()
        await group.joined()
        await until_has(slave, b"one", b"late", b"alone")


async def test_a_member_that_dies_costs_a_delay_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: the wait of a put is longer than a member is waited for."""
    monkeypatch.delitem(QUICK, "slaveTimeout")
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        assert await send(master, b"one") == ResponseCode.SUCCESS
        await slave.cut_short()
        began = trio.current_time()
        assert await send(master, b"two") == ResponseCode.SUCCESS
        assert trio.current_time() - began >= 0.5  # it did wait, for most of haMaxTimeSlaveNotCatchup
        assert (await group.state()).members == [1]


async def test_a_topic_that_was_answered_is_there_after_a_failover(tmp_path: Path) -> None:
    """With all that belongs to it, though its messages show only some of its queues."""
    async with running_group(tmp_path, 2) as group:
        old = group.replicas[0]
        ext = {"topic": "Made", "defaultTopic": "TBW102", "readQueueNums": "8", "writeQueueNums": "8", "perm": "6"}
        ext |= {"topicFilterType": "SINGLE_TAG", "order": "false", "attributes": "+message.type=FIFO"}
        async with WireClient.connect(old.controller.endpoint) as client:
            assert (await client.send(TOPIC, b"one")).code == ResponseCode.SUCCESS
            assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == ResponseCode.SUCCESS
            table = old.controller.context.topics.table
            await old.cut_short()
        new = await group.master(but=old)
        found = new.controller.context.topics.table
        assert found[TOPIC].write_queue_nums > 1
        assert {name: found[name] for name in (TOPIC, "Made")} == {name: table[name] for name in (TOPIC, "Made")}


async def test_only_members_are_elected(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        await slave.cut_short()
        await group.joined(master)
        assert await send(master, b"only here") == ResponseCode.SUCCESS
        await master.cut_short()
        await slave.start()  # it is no member: it waits
        await until(lambda: "no_master" in [reason.code for reason in slave.controller.health.readiness().reasons])
        assert not slave.leads
        await master.start()
        await group.joined()
        assert master.leads
        await until_has(slave, b"only here")


async def test_an_orderly_stop_hands_over(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        assert await send(master, b"one") == ResponseCode.SUCCESS
        with trio.fail_after(5):
            await master.stop()
            assert (await group.state()).master == 2  # before the lease has ended
        assert await group.master(but=master) is slave
        assert await bodies(slave) == [b"one"]


async def test_epochs_and_addresses_are_said_to_those_who_ask(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        assert await send(master, b"one") == ResponseCode.SUCCESS
        async with WireClient.connect(master.controller.endpoint) as client:
            reply = await client.ask(RequestCode.GET_BROKER_EPOCH_CACHE)
            found = json.loads(bytes(reply.body))
            end = master.controller.context.store.appended_offset
            assert found == {
                "clusterName": "DefaultCluster",
                "brokerName": NAME,
                "brokerId": 0,
                "epochList": [{"epoch": 1, "startOffset": 0, "endOffset": 2**63 - 1}],
                "maxOffset": end,
            }
            fields = (await client.ask(RequestCode.EXCHANGE_BROKER_HA_INFO)).ext_fields()
            assert fields["masterAddress"] == master.broker.address
            assert fields["masterHaAddress"].startswith("127.0.0.1:")
        async with WireClient.connect(slave.controller.endpoint) as client:
            assert not (await client.ask(RequestCode.EXCHANGE_BROKER_HA_INFO)).ext_fields()


async def test_a_store_of_another_broker_is_refused(tmp_path: Path) -> None:
    async with running_group(tmp_path, 1) as group:
        await group.replicas[0].stop()
        settings = configuration(tmp_path / "broker-0", {**QUICK, **group.addresses, "brokerName": "group-b"})
        broker = ReplicatedBroker(settings)
        with pytest.raises(ExceptionGroup) as raised:
            await broker.run()
        assert raised.group_contains(StartError, match="the store belongs to the broker group-a")


async def test_offsets_are_at_most_a_second_old_after_a_failover(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        for number in range(5):
            assert await send(master, b"%d" % number) == ResponseCode.SUCCESS
        offsets = slave.controller.context.offsets
        async with WireClient.connect(master.controller.endpoint) as client:
            body = json.dumps({"groupName": "G"}).encode()
            assert (await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)).code == 0
        async with WireClient.connect(master.controller.endpoint) as client:
            for offset in (1, 4):
                ext = {"consumerGroup": "G", "topic": TOPIC, "queueId": 0, "commitOffset": offset}
                assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, ext)).code == 0
                began = trio.current_time()
                await until(lambda offset=offset: offsets.query("G", TOPIC, 0) == offset)  # type: ignore[misc]
                assert trio.current_time() - began < 2.5  # a round a second, and what its requests take
        await master.cut_short()
        new = await group.master(but=master)
        assert new.controller.context.offsets.query("G", TOPIC, 0) == 4
        assert new.controller.context.offsets.data_version.state_version == 2


@pytest.mark.parametrize("chosen", [True, False])
async def test_a_port_that_the_system_has_chosen_stays_the_brokers_between_two_roles(
    chosen: bool, tmp_path: Path
) -> None:
    """One that is configured is free while no role has it, as it is after a stop."""
    port = 0 if chosen else free_port()
    settings = {**QUICK, "controllerAddr": "127.0.0.1:1", "bindAddress": "127.0.0.1", "listenPort": port}
    broker = ReplicatedBroker(configuration(tmp_path, settings))

    def is_free() -> bool:
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", int(broker.address.rpartition(":")[2])))
            except OSError:
                return False
        return True

    async with AsyncExitStack() as stack:
        broker._choose_ports(stack)
        assert is_free() is not chosen
        with ClientPorts(broker.configuration.section(BrokerConfig), NettyServerConfig(), broker.network) as ports:
            ports.open()  # as a role does
            assert not is_free()
            # A VIP port beside a chosen port would be one that any process can have.
            assert len(ports.sockets) == (1 if chosen else 2)
    assert is_free()


@pytest.mark.parametrize("elected", [False, True])
async def test_cuts_that_settle_nothing_are_no_hot_loop(
    elected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a stop does not wait for the next start, nor does an election."""
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        assert await send(master, b"one") == ResponseCode.SUCCESS
        compare = AutoSwitchHAClient._compare

        async def never(client: AutoSwitchHAClient, _theirs: object, log_end: int) -> None:
            client._leadership.on_truncate(log_end)
            raise TruncationNeededError("again")

        monkeypatch.setattr(AutoSwitchHAClient, "_compare", never)
        monkeypatch.setattr("trimq.broker.replicated_broker._FIRST_CUT_PAUSE", 1000.0)
        monkeypatch.setattr("trimq.broker.replicated_broker._LONGEST_CUT_PAUSE", 1000.0)
        before = slave.broker.changes
        with capture_logs() as logs:
            ha = master.controller.context.store.replication.ha
            assert ha is not None
            ha.connections[0].close("closed by the test")
            await until(lambda: [log["event"] for log in logs].count("role_changes") == 2)
            await slave.controller.stopped.wait()
            assert slave.broker.changes == before + 1  # the second cut waits
            if elected:
                monkeypatch.setattr(AutoSwitchHAClient, "_compare", compare)
                await master.stop()
                with trio.fail_after(20):
                    await group.master(but=master)
                await until_has(slave, b"one")
                return
            with trio.fail_after(5):
                await slave.stop()  # and a stop does not wait for it
        monkeypatch.setattr(AutoSwitchHAClient, "_compare", compare)
        await slave.start()
        await group.joined()


async def test_joins_and_stops_are_no_warnings(tmp_path: Path) -> None:
    """A slave that is not registered yet would be refused; a tail that is not confirmed is no unfinished stop."""
    with capture_logs() as logs:
        async with running_group(tmp_path, 3) as group:
            assert await send(group.replicas[0], b"one") == ResponseCode.SUCCESS
            joined = list(logs)
            await group.replicas[2].stop()
            old = group.replicas[0]
            await old.cut_short()
            new = await group.master(but=old)
            await new.stop()
    unwanted = {"slave_refused", "master_lost", "topics_not_replicated", "topics_not_followed"}
    assert [log["event"] for log in joined if log["event"] in unwanted] == []
    assert [log for log in logs if log["event"] == "store_closed_unfinished"] == []
    assert [log["event"] for log in logs].count("master_lost") <= 2


async def test_a_broker_that_was_removed_joins_again_when_it_is_restarted(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        await slave.stop()
        await group.manager.replicas.clean(NAME, [2], living=True)
        await group.joined(master)
        await slave.start()
        await group.joined()
        assert slave.broker.manager.broker_id == 2
        assert await send(master, b"to both") == ResponseCode.SUCCESS
        await until_has(slave, b"to both")


async def test_a_broker_that_is_removed_while_it_runs_says_so(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        await group.manager.replicas.clean(NAME, [2], living=True)
        await until(lambda: "they do not know broker id 2" in slave.broker.manager.problem)
        await group.joined(master)
        await slave.stop()
        await slave.start()
        await group.joined()
        await until(lambda: not slave.broker.manager.problem)


async def test_a_master_whose_group_is_removed_acknowledges_nothing_when_its_lease_has_ended(tmp_path: Path) -> None:
    async with running_group(tmp_path, 2) as group:
        master, slave = group.replicas
        assert await send(master, b"before") == ResponseCode.SUCCESS
        await group.manager.replicas.clean(NAME, None, living=True)
        await until(lambda: not master.broker.manager.lead_holds)
        assert await send(master, b"after") == ResponseCode.FLUSH_SLAVE_TIMEOUT
        await until(lambda: "they do not know broker id 1" in master.broker.manager.problem)
        assert "all brokers of group-a were removed" in master.broker.manager.problem
        assert not slave.leads


async def test_users_are_there_after_a_failover_and_every_member_proves_itself(tmp_path: Path) -> None:
    keys = str(key_file(tmp_path))
    inner = json.dumps({"accessKey": "brokers", "secretKey": "inner secret"})
    changes = {
        **ON,
        "allowSecretsInClear": False,
        "authKeyFile": keys,
        "haSecretFile": keys,
        "innerClientAuthenticationCredentials": inner,
    }
    async with running_group(tmp_path, 2, **changes) as group:
        old, slave = group.replicas
        async with WireClient.connect(old.controller.endpoint) as client:
            await User(client).make("app", f"Topic:{TOPIC} Pub")
        assert users_of(old).acl("app") is not None
        await until(lambda: users_of(slave).list_acls() == users_of(old).list_acls())
        await old.cut_short()
        new = await group.master(but=old)
        assert new is slave
        async with WireClient.connect(new.controller.endpoint) as client:
            # Both come from the file: the group was made anew with the role.
            await User(client).make("later")
            assert is_refused(await User(client, "app").ask(RequestCode.GET_BROKER_RUNTIME_INFO))
            assert is_refused(await User(client, "unknown").ask(RequestCode.GET_BROKER_RUNTIME_INFO))
        await old.start()
        await group.joined()
        # The former master takes what the new one has.
        await until(lambda: users_of(old).user("later") is not None)
        assert dict(users_of(old).users) == dict(users_of(new).users)


async def test_an_orderly_stop_hands_over_at_controllers_with_users_without_tls(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "users", keys, model.User("brokers", "inner secret", model.UserType.SUPER))
    inner = json.dumps({"accessKey": "brokers", "secretKey": "inner secret"})
    controller = following(tmp_path / "users", keys) | {"innerClientAuthenticationCredentials": inner}
    async with running_group(tmp_path, 2, controller=controller, innerClientAuthenticationCredentials=inner) as group:
        first, second = group.replicas
        with capture_logs() as logs:
            await first.stop()
            await group.master(but=first)
        assert second.leads
        assert [line["master_id"] for line in logs if line["event"] == "handed_over"] == [2]
        assert not [line for line in logs if line["event"] in {"not_handed_over", "access_refused"}]


async def test_a_secret_that_cannot_be_read_at_a_change_of_role_stays_the_one_of_before(tmp_path: Path) -> None:
    """The broker goes on, says so, and still lets in no slave that does not prove that it has the secret."""
    path = key_file(tmp_path)
    kept = path.read_bytes()
    async with running_group(tmp_path, 2, haSecretFile=str(path), haAllowedAddresses="127.0.0.1") as group:
        old, slave = group.replicas
        assert await send(old, b"before") == ResponseCode.SUCCESS
        await group.joined()
        path.unlink()
        with capture_logs() as logs:
            await old.cut_short()
            new = await group.master(but=old)
        assert new is slave
        (line,) = [line for line in logs if line["event"] == "ha_secret_not_read"]
        assert f"haSecretFile {path} cannot be read: No such file" in line["reason"]
        notes = {note.code: note.text for note in new.controller.health.readiness().notes}
        assert "a restart would fail" in notes["ha_secret_not_read"]
        with capture_logs() as logs:
            async with await trio.open_tcp_stream("127.0.0.1", new.controller.replication.port) as stream:
                await stream.send_all(bytes(8))
                with contextlib.suppress(trio.BrokenResourceError):
                    assert await stream.receive_some(1) == b""
        advice = [line["advice"] for line in logs if line["event"] == "slave_refused"]
        assert advice == ["the slave proves nothing: set haSecretFile there, or haAllowedWithoutProof here"]
        path.write_bytes(kept)
        path.chmod(0o600)
        await old.start()
        await group.joined()
        assert await send(new, b"after") == ResponseCode.SUCCESS


def users_of(replica: Replica) -> AuthStore:
    assert replica.controller.context.users is not None
    return replica.controller.context.users.store
