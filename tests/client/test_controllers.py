"""Administration of controllers against scripted ones: which is asked, what is printed, what an election would lose."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from click.testing import CliRunner, Result

from tests.client.scripted import Answer, ScriptedBroker, scripted_broker
from tests.ports import free_port
from trimq.client import Admin
from trimq.client.admin.controllers import common_end
from trimq.client.errors import NotStoredError, UnreachableError, UsageError
from trimq.client.mqadmin import main
from trimq.protocol.body import (
    BrokerMemberGroup,
    BrokerReplicasInfo,
    ElectMasterResponseBody,
    EpochEntry,
    EpochEntryCache,
    ReplicaIdentity,
    ReplicasInfo,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

METADATA = RequestCode.CONTROLLER_GET_METADATA_INFO
SYNC_STATE = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
ELECT = RequestCode.CONTROLLER_ELECT_MASTER
EPOCHS = RequestCode.GET_BROKER_EPOCH_CACHE


def metadata(leader: str, *, leads: bool) -> Answer:
    fields = {"group": "g", "controllerLeaderId": "n0", "isLeader": "true" if leads else "false"}
    if leader:
        fields |= {"controllerLeaderAddress": leader, "peers": f"n0:{leader};n1:127.0.0.1:1;"}
    return lambda command: command.reply(header=fields)


def epochs(*starts: int, end: int) -> EpochEntryCache:
    """A log whose epochs 1, 2, ... begin at these offsets."""
    ends = [*starts[1:], 2**63 - 1][: len(starts)]
    entries = [
        EpochEntry(epoch=at, start_offset=start, end_offset=until)
        for at, (start, until) in enumerate(zip(starts, ends, strict=True), 1)
    ]
    return EpochEntryCache(cluster_name="c", broker_name="a", epoch_list=entries, max_offset=end)


def body(value: object) -> Answer:
    return lambda command: command.reply(body=encode_json(value))


@dataclass
class Scene:
    """A controller, which is also the broker with id 1 and the master, and the broker with id 2 outside of the set."""

    controller: ScriptedBroker
    outside: ScriptedBroker

    async def run(self, *words: str) -> Result:
        words = (*words, "-n", self.controller.address)
        return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(main, list(words)))

    async def at_controller(self, command: str, *words: str) -> Result:
        return await self.run(command, "-a", self.controller.address, *words)

    async def elect(self, number: int, *words: str) -> Result:
        return await self.at_controller("electMaster", "-b", str(number), "-bn", "a", "-c", "c", *words)

    def sent(self, code: int) -> list[RemotingCommand]:
        return [command for _, command in self.controller.seen if command.code == code]


def elected(number: int, address: str) -> Answer:
    group = BrokerMemberGroup(broker_addrs={"1": "x:1", "2": "x:2"}, broker_name="a", cluster="c")
    fields = {"masterBrokerId": str(number), "masterAddress": address, "masterEpoch": "8", "syncStateSetEpoch": "5"}
    found = ElectMasterResponseBody(broker_member_group=group, sync_state_set=[number])
    return lambda command: command.reply(header=fields, body=encode_json(found))


@asynccontextmanager
async def scene(*, outside_alive: bool = True) -> AsyncIterator[Scene]:
    async with scripted_broker() as controller, scripted_broker() as outside:
        info = ReplicasInfo(
            master_broker_id=1,
            master_address=controller.address,
            master_epoch=7,
            sync_state_set_epoch=4,
            in_sync_replicas=[
                ReplicaIdentity(broker_name="a", broker_id=1, broker_address=controller.address, alive=True)
            ],
            not_in_sync_replicas=[
                ReplicaIdentity(broker_name="a", broker_id=2, broker_address=outside.address, alive=outside_alive)
            ],
        )
        controller.answers |= {
            METADATA: metadata(controller.address, leads=True),
            SYNC_STATE: body(BrokerReplicasInfo(replicas_info_table={"a": info})),
            EPOCHS: body(epochs(0, 300, end=900)),
            ELECT: elected(2, outside.address),
            RequestCode.GET_BROKER_CLUSTER_INFO: body(
                {
                    "brokerAddrTable": {
                        "a": {
                            "cluster": "c",
                            "brokerName": "a",
                            "brokerAddrs": {"0": controller.address, "2": outside.address},
                        }
                    },
                    "clusterAddrTable": {"c": ["a"]},
                }
            ),
        }
        outside.answers[EPOCHS] = body(epochs(0, end=500))
        yield Scene(controller, outside)


# -- which controller is asked -----------------------------------------------------------------------------------------


async def test_the_leader_is_asked_whichever_address_was_given() -> None:
    async with scene() as on, scripted_broker() as follower, Admin() as admin:
        follower.answers[METADATA] = metadata(on.controller.address, leads=False)
        found = await admin.sync_state(follower.address, ["a"])
        assert found["a"].master_address == on.controller.address
        assert follower.counts[SYNC_STATE] == 0
        assert [json.loads(bytes(command.body)) for command in on.sent(SYNC_STATE)] == [["a"]]


async def test_a_controller_that_leads_is_asked_at_the_address_that_reached_it() -> None:
    async with scene() as on, Admin() as admin:
        on.controller.answers[METADATA] = metadata("192.0.2.1:9", leads=True)
        assert "a" in await admin.sync_state(on.controller.address, ["a"])


async def test_the_next_controller_is_asked_if_one_is_silent_or_does_not_lead() -> None:
    async with scene() as on, scripted_broker() as lost, Admin() as admin:
        lost.answers |= {
            METADATA: metadata(lost.address, leads=True),
            SYNC_STATE: lambda command: command.reply(ResponseCode.CONTROLLER_NOT_LEADER, "no"),
        }
        silent = f"127.0.0.1:{free_port()}"
        assert "a" in await admin.sync_state(f"{silent};{lost.address};{on.controller.address}", ["a"])
        assert lost.counts[SYNC_STATE] == 1
        assert (await admin.controller_metadata([silent, on.controller.address])).address == on.controller.address


async def test_without_a_leader_or_without_an_answer_nothing_is_sent() -> None:
    async with scripted_broker() as one, Admin() as admin:
        one.answers[METADATA] = metadata("", leads=False)
        with pytest.raises(NotStoredError, match="no controller leads now"):
            await admin.sync_state(one.address, ["a"])
        assert one.counts[SYNC_STATE] == 0
        with pytest.raises(UnreachableError):
            await admin.sync_state(f"127.0.0.1:{free_port()}", ["a"])
        for wrong in ("", ";", "localhost", "localhost:"):
            with pytest.raises(UsageError, match=r"host:port"):
                await admin.sync_state(wrong, ["a"])


# -- what the commands print -------------------------------------------------------------------------------------------


async def test_the_set_is_shown_by_broker_and_by_cluster() -> None:
    async with scene() as on:
        result = await on.at_controller("getSyncStateSet", "-b", "a")
        assert result.exit_code == 0, result.output
        lines = [" ".join(line.split()) for line in result.output.splitlines()]
        assert f"#MasterAddr : {on.controller.address}" in lines
        assert "#MasterEpoch : 7" in lines
        assert "#SyncStateSetNums : 1" in lines
        assert f"1 {on.controller.address} true true" in lines
        assert f"2 {on.outside.address} false true" in lines
        result = await on.at_controller("getSyncStateSet", "-c", "c", "--json")
        found = json.loads(result.output)["a"]
        assert (found["masterBrokerId"], found["masterEpoch"], found["syncStateSetEpoch"]) == (1, 7, 4)
        assert [(one["brokerId"], one["inSync"]) for one in found["brokers"]] == [(1, True), (2, False)]


async def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    async with scene() as on:
        result = await on.at_controller("getSyncStateSet", "-b", "other")
        assert (result.exit_code, "know no broker other" in result.output) == (1, True)
        result = await on.at_controller("getSyncStateSet", "-c", "other")
        assert "no cluster other; there are c" in result.output
        for command in ("getSyncStateSet", "getBrokerEpoch"):
            words = ["-a", on.controller.address] if command == "getSyncStateSet" else []
            result = await on.run(command, *words)
            assert (result.exit_code, "either -b" in result.output) == (2, True)
        result = await on.elect(3)
        assert "no broker with the id 3; there are 1, 2" in result.output
        assert on.sent(ELECT) == []


async def test_epochs_of_each_broker_and_a_silent_one_is_listed() -> None:
    async with scene() as on:
        on.outside.answers[EPOCHS] = lambda command: command.reply(ResponseCode.SYSTEM_ERROR, "no epochs here")
        result = await on.run("getBrokerEpoch", "-b", "a", "--json")
        assert result.exit_code == 0, result.output
        first, second, silent = json.loads(result.output)
        assert (first["Addr"], first["Epoch"], first["Start Offset"], first["End Offset"]) == (
            on.controller.address,
            1,
            0,
            300,
        )
        assert (second["Epoch"], second["Start Offset"], second["End Offset"]) == (2, 300, 900)
        assert (silent["Addr"], "no epochs here" in silent["Error"]) == (on.outside.address, True)


async def test_metadata_and_configuration() -> None:
    async with scene() as on:
        result = await on.at_controller("getControllerMetaData")
        assert f"#ControllerLeaderAddress : {on.controller.address}" in result.output
        assert "#Peer:\tn1:127.0.0.1:1\n" in result.output
        found = json.loads((await on.at_controller("getControllerMetaData", "--json")).output)
        assert (found["group"], found["isLeader"], len(found["peers"])) == ("g", True, 2)
        on.controller.answers[RequestCode.GET_CONTROLLER_CONFIG] = lambda command: command.reply(body=b"one=1\ntwo=2\n")
        both = f"{on.controller.address};{on.outside.address}"
        on.outside.answers |= on.controller.answers
        result = await on.run("getControllerConfig", "-a", both)
        assert result.output.count("two : 2") == 2
        assert f"============{on.outside.address}============" in result.output
        result = await on.run("updateControllerConfig", "-a", both, "-k", "one", "-v", "3")
        assert "update controller config success" in result.output
        for server in (on.controller, on.outside):
            [changed] = [c for _, c in server.seen if c.code == RequestCode.UPDATE_CONTROLLER_CONFIG]
            assert bytes(changed.body) == b"one=3\n"


async def test_brokers_are_forgotten_by_id() -> None:
    async with scene() as on:
        result = await on.at_controller("cleanBrokerMetadata", "-bn", "a")
        assert (result.exit_code, "give -c" in result.output) == (2, True)
        result = await on.at_controller("cleanBrokerMetadata", "-bn", "a", "-c", "c", "-b", "1;x")
        assert (result.exit_code, "1;2;3" in result.output) == (2, True)
        assert on.sent(RequestCode.CLEAN_BROKER_DATA) == []
        result = await on.at_controller("cleanBrokerMetadata", "-bn", "a", "-c", "c", "-b", "2;3")
        assert (result.exit_code, result.output) == (0, "clear broker a metadata from controller success!\n")
        await on.at_controller("cleanBrokerMetadata", "-bn", "a", "-l")
        some, every = (command.ext_fields() for command in on.sent(RequestCode.CLEAN_BROKER_DATA))
        assert (some["clusterName"], some["brokerControllerIdsToClean"], some["isCleanLivingBroker"]) == (
            "c",
            "2;3",
            "false",
        )
        assert every["isCleanLivingBroker"] == "true"
        assert "brokerControllerIdsToClean" not in every


# -- elections ---------------------------------------------------------------------------------------------------------


async def test_a_member_of_the_set_is_elected_at_once() -> None:
    async with scene() as on:
        on.controller.answers[ELECT] = elected(1, on.controller.address)
        result = await on.elect(1)
        assert result.exit_code == 0, result.output
        assert "bytes" not in result.output
        assert f"#BrokerMasterAddr : {on.controller.address}" in " ".join(result.output.split())
        assert "\t#Broker\t2\tx:2" in result.output
        [command] = on.sent(ELECT)
        fields = command.ext_fields()
        assert (fields["clusterName"], fields["brokerName"], fields["brokerId"]) == ("c", "a", "1")
        assert fields["designateElect"] == "true"


async def test_the_master_stays_the_master() -> None:
    async with scene() as on:

        def kept(command: RemotingCommand) -> RemotingCommand:
            fields = {"masterBrokerId": "1", "masterAddress": "m:1", "masterEpoch": "7", "syncStateSetEpoch": "4"}
            return command.reply(ResponseCode.CONTROLLER_MASTER_STILL_EXIST, "still alive", fields)

        on.controller.answers[ELECT] = kept
        result = await on.elect(1)
        assert (result.exit_code, "broker 1 is the master already" in result.output) == (0, True)
        assert json.loads((await on.elect(1, "--json")).output)["changed"] is False


async def test_a_broker_outside_of_the_set_is_elected_only_if_the_loss_is_accepted() -> None:
    async with scene() as on:
        result = await on.elect(2)
        assert result.exit_code == 1
        # the logs are the same up to 300, where the second epoch begins at the member
        assert f"600 bytes of {on.controller.address}" in result.output
        assert "not elected: up to 600 bytes would be lost" in result.output
        assert "--unclean" in result.output
        assert on.sent(ELECT) == []
        result = await on.elect(2, "--unclean")
        assert result.exit_code == 0, result.output
        assert "600 bytes" in result.output
        assert len(on.sent(ELECT)) == 1


async def test_what_a_silent_member_has_is_not_known() -> None:
    async with scene() as on:
        on.controller.answers[EPOCHS] = lambda command: command.reply(ResponseCode.SYSTEM_BUSY, "busy")
        result = await on.elect(2)
        assert result.exit_code == 1
        assert f"unknown: {on.controller.address} does not answer (busy)" in result.output
        assert "not known: members" in " ".join(result.output.split())
        assert on.sent(ELECT) == []


@pytest.mark.parametrize(
    ("number", "alive", "why"),
    [
        (2, True, "updateControllerConfig -a ALL_CONTROLLERS -k enableElectUncleanMaster -v true"),
        (2, False, "sends no heartbeats to the controllers"),
        (1, True, "the SyncStateSet has changed"),
    ],
)
async def test_a_refusal_says_what_to_do(number: int, alive: bool, why: str) -> None:
    async with scene(outside_alive=alive) as on:
        on.controller.answers[ELECT] = lambda command: command.reply(
            ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, "Failed to elect a new master"
        )
        result = await on.elect(number, "--unclean")
        assert (result.exit_code, why in result.output) == (1, True), result.output


@pytest.mark.parametrize(
    ("one", "other", "end"),
    [
        (epochs(0, 300, end=900), epochs(0, 300, end=700), 700),
        (epochs(0, 300, end=900), epochs(0, end=200), 200),
        (epochs(0, 300, end=900), epochs(0, 400, end=500), 300),
        (epochs(0, end=900), epochs(50, end=500), 0),
        (epochs(0, end=900), epochs(end=0), 0),
    ],
)
def test_the_common_part_of_two_logs(one: EpochEntryCache, other: EpochEntryCache, end: int) -> None:
    assert common_end(one, other) == common_end(other, one) == end
