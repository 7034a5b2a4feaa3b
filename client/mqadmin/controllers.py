"""mqadmin: commands for controllers, and for the brokers whose roles they assign."""

from dataclasses import dataclass, field

import click

from trimq.client.admin import Admin
from trimq.client.admin.controllers import common_end
from trimq.client.errors import NotStoredError, RocketMQError, UsageError
from trimq.client.mqadmin.shell import Commands, Output
from trimq.protocol.body import EpochEntryCache, ReplicaIdentity, ReplicasInfo
from trimq.protocol.codes import ResponseCode

commands: Commands = Commands()

_controllers = click.option(
    "-a", "--controllerAddress", "controllers", required=True, help="Controllers, host:port, separated by semicolons."
)
_interval = click.option(
    "-i", "--interval", type=int, help="Accepted; prints once all the same. For a loop use watch(1)."
)
_UNCLEAN = "enableElectUncleanMaster"


@commands.add("getSyncStateSet")
@_controllers
@click.option("-b", "--brokerName", "name", help="A broker's name.")
@click.option("-c", "--clusterName", "cluster", help="A cluster's name: all its brokers; needs -n.")
@_interval
async def sync_state_set(
    admin: Admin, out: Output, *, controllers: str, name: str | None, cluster: str | None, interval: int | None
) -> None:
    """Show the master, and which brokers have every acknowledged message."""
    _ = interval
    names = await _names(admin, name, cluster)
    found = await admin.sync_state(controllers, names)
    if name is not None and name not in found:
        raise _unknown(name)
    if out.as_json:
        out.record({one: _as_json(info) for one, info in sorted(found.items())})
        return
    for one, info in sorted(found.items()):
        out.record(
            {
                "#brokerName": one,
                "#MasterBrokerId": info.master_broker_id,
                "#MasterAddr": info.master_address,
                "#MasterEpoch": info.master_epoch,
                "#SyncStateSetEpoch": info.sync_state_set_epoch,
                "#SyncStateSetNums": len(info.in_sync_replicas),
            }
        )
        out.table(["Broker Id", "Addr", "In Sync", "Alive"], _members(info))
        out.say("")


def _as_json(info: ReplicasInfo) -> dict[str, object]:
    return {
        "masterBrokerId": info.master_broker_id,
        "masterAddress": info.master_address,
        "masterEpoch": info.master_epoch,
        "syncStateSetEpoch": info.sync_state_set_epoch,
        "brokers": [
            {"brokerId": number, "brokerAddress": address, "inSync": in_sync, "alive": alive}
            for number, address, in_sync, alive in _members(info)
        ],
    }


def _members(info: ReplicasInfo) -> list[tuple[int, str, bool, bool]]:
    found = [(one.broker_id, one.broker_address, True, one.alive) for one in info.in_sync_replicas]
    found += [(one.broker_id, one.broker_address, False, one.alive) for one in info.not_in_sync_replicas]
    return sorted(found)


async def _names(admin: Admin, name: str | None, cluster: str | None) -> list[str]:
    """The broker's name, or those of a cluster. Raises click.UsageError unless exactly one is given."""
    if (name is None) == (cluster is None):
        raise click.UsageError("give either -b (a broker's name) or -c (a cluster's name)")
    if cluster is None:
        return [str(name)]
    clusters = (await admin.cluster_info()).cluster_addr_table
    if cluster not in clusters:
        raise UsageError(f"no cluster {cluster}; there are {', '.join(sorted(clusters))}")
    return sorted(clusters[cluster])


def _unknown(name: str) -> UsageError:
    return UsageError(f"the controllers know no broker {name}", code=ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST)


@commands.add("getBrokerEpoch")
@click.option("-b", "--brokerName", "name", help="A broker's name; or the address of one broker.")
@click.option("-c", "--clusterName", "cluster", help="A cluster's name: all its brokers.")
@_interval
async def broker_epoch(
    admin: Admin, out: Output, *, name: str | None, cluster: str | None, interval: int | None
) -> None:
    """Show the epochs of brokers' logs: which master has written what."""
    _ = interval
    if (name is None) == (cluster is None):
        raise click.UsageError("give either -b (a broker's name) or -c (a cluster's name)")
    rows: list[list[object]] = []
    for address in await admin.addresses(broker=name, cluster=cluster, masters_only=False):
        try:
            found = await admin.epochs(address)
        except RocketMQError as error:  # a name server lists a dead broker for a while, just when this is asked
            rows.append(["", "", "", address, "", "", "", str(error)])
            continue
        start = [found.cluster_name, found.broker_name, found.broker_id, address]
        rows += [
            [*start, entry.epoch, entry.start_offset, min(entry.end_offset, found.max_offset), ""]
            for entry in found.epoch_list
        ]
    out.table(["Cluster Name", "Broker Name", "BID", "Addr", "Epoch", "Start Offset", "End Offset", "Error"], rows)


@commands.add("electMaster")
@_controllers
@click.option("-b", "--brokerId", "broker_id", type=int, required=True, help="The broker's id at the controllers.")
@click.option("-bn", "--brokerName", "name", required=True, help="The broker's name.")
@click.option("-c", "--clusterName", "cluster", required=True, help="The cluster's name.")
@click.option("--unclean", is_flag=True, help="Also a broker outside of the SyncStateSet: messages may be lost.")
async def elect_master(
    admin: Admin, out: Output, *, controllers: str, broker_id: int, name: str, cluster: str, unclean: bool
) -> None:
    """Make a broker the master; of one outside of the SyncStateSet print what would be lost."""
    info = (await admin.sync_state(controllers, [name])).get(name)
    if info is None:
        raise _unknown(name)
    chosen = _find(info, broker_id)
    clean = chosen in info.in_sync_replicas
    if not clean:
        losses = await _losses(admin, chosen, info)
        out.say(f"Broker {broker_id} ({chosen.broker_address}) is not in the SyncStateSet of {name}. If it becomes the")
        out.say("master, the other brokers drop what it does not have:")
        for line in losses.lines():
            out.say(f"  {line}")
        if not unclean:
            raise NotStoredError(
                f"not elected: {losses.summary()}. Start a member of the SyncStateSet instead, or let this broker "
                "catch up with the master. To lose the messages, repeat the command with --unclean"
            )
    try:
        found = await admin.elect_master(controllers, cluster, name, broker_id)
    except NotStoredError as error:
        if error.code != ResponseCode.CONTROLLER_ELECT_MASTER_FAILED:
            raise
        raise _refused(error, chosen, clean=clean) from error
    if out.as_json:
        out.record(
            {
                "clusterName": cluster,
                "brokerName": name,
                "changed": found.changed,
                "masterBrokerId": found.master_id,
                "masterAddress": found.master_address,
                "masterEpoch": found.master_epoch,
                "syncStateSetEpoch": found.set_epoch,
                "brokers": found.brokers,
            }
        )
        return
    if not found.changed:
        out.say(f"broker {found.master_id} is the master already, nothing changed")
    out.record(
        {
            "#ClusterName": cluster,
            "#BrokerName": name,
            "#BrokerMasterAddr": found.master_address,
            "#MasterEpoch": found.master_epoch,
            "#SyncStateSetEpoch": found.set_epoch,
        }
    )
    out.lines(f"\t#Broker\t{number}\t{address}" for number, address in sorted(found.brokers.items()))


def _find(info: ReplicasInfo, broker_id: int) -> ReplicaIdentity:
    every = [*info.in_sync_replicas, *info.not_in_sync_replicas]
    for one in every:
        if one.broker_id == broker_id:
            return one
    ids = ", ".join(str(number) for number in sorted(one.broker_id for one in every))
    raise UsageError(f"the controllers know no broker with the id {broker_id}; there are {ids}")


def _refused(error: NotStoredError, chosen: ReplicaIdentity, *, clean: bool) -> NotStoredError:
    """The error of an election that the controllers refuse without a reason, with the reasons that there can be."""
    if not chosen.alive:
        why = f"broker {chosen.broker_id} ({chosen.broker_address}) sends no heartbeats to the controllers"
    elif clean:
        why = "the SyncStateSet has changed, or the broker was no longer alive; see getSyncStateSet"
    else:
        why = (
            f"the controllers elect only members of the SyncStateSet unless {_UNCLEAN}=true. To lose the messages: "
            f"mqadmin updateControllerConfig -a ALL_CONTROLLERS -k {_UNCLEAN} -v true, elect, and set it to false again"
        )
    return NotStoredError(f"not elected: {why}", code=error.code, address=error.address)


@dataclass
class _Losses:
    """What the members of a SyncStateSet have that a broker outside of it does not have, in bytes of the log."""

    behind: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line for each member of the set."""
        found = [f"{count} bytes of {address}" for address, count in self.behind.items()]
        return found + [f"unknown: {address} does not answer ({why})" for address, why in self.unknown.items()]

    def summary(self) -> str:
        """What is lost at most, in one sentence."""
        most = max(self.behind.values(), default=0)
        if self.unknown:
            return (
                f"at least {most} bytes would be lost, and what the silent members have"
                if most
                else ("what would be lost is not known: members of the SyncStateSet are silent")
            )
        return f"up to {most} bytes would be lost"


async def _losses(admin: Admin, chosen: ReplicaIdentity, info: ReplicasInfo) -> _Losses:
    found = _Losses()
    own: EpochEntryCache | None = None
    try:
        own = await admin.epochs(chosen.broker_address)
    except RocketMQError as error:
        found.unknown[chosen.broker_address] = error.text
    for member in info.in_sync_replicas:
        try:
            theirs = await admin.epochs(member.broker_address)
        except RocketMQError as error:
            found.unknown[member.broker_address] = error.text
        else:
            if own is not None:
                found.behind[member.broker_address] = theirs.max_offset - common_end(own, theirs)
    return found


@commands.add("cleanBrokerMetadata")
@_controllers
@click.option("-b", "--brokerControllerIdsToClean", "ids", help="Ids at the controllers, as 1;2;3. Default: all.")
@click.option("-bn", "--brokerName", "name", required=True, help="The broker's name.")
@click.option("-c", "--clusterName", "cluster", help="The cluster's name; not needed with -l.")
@click.option("-l", "--cleanLivingBroker", "living", is_flag=True, help="Also brokers that are alive.")
async def clean_metadata(
    admin: Admin, out: Output, *, controllers: str, ids: str | None, name: str, cluster: str | None, living: bool
) -> None:
    """Let the controllers forget brokers that will not come back."""
    if not living and not cluster:
        raise click.UsageError("give -c (the cluster's name), or -l (also brokers that are alive)")
    try:
        numbers = [int(part) for part in (ids or "").split(";") if part.strip()]
    except ValueError:
        raise click.UsageError(f"-b {ids!r} is no list of ids: give them as 1;2;3") from None
    await admin.clean_broker_metadata(controllers, name, cluster=cluster, broker_ids=numbers, living=living)
    out.say(f"clear broker {name} metadata from controller success!")
    if out.as_json:
        out.record({"brokerName": name, "brokerIds": numbers or None})


@commands.add("getControllerMetaData")
@_controllers
async def controller_metadata(admin: Admin, out: Output, *, controllers: str) -> None:
    """Show the controllers, and which of them leads."""
    found = await admin.controller_metadata(controllers)
    if out.as_json:
        out.record(
            {
                "group": found.group,
                "controllerLeaderId": found.leader_id,
                "controllerLeaderAddress": found.leader_address,
                "isLeader": found.is_leader,
                "peers": found.peers,
            }
        )
        return
    out.record(
        {
            "#ControllerGroup": found.group,
            "#ControllerLeaderId": found.leader_id,
            "#ControllerLeaderAddress": found.leader_address,
        }
    )
    out.lines(f"#Peer:\t{peer}" for peer in found.peers)


@commands.add("getControllerConfig")
@_controllers
async def controller_config(admin: Admin, out: Output, *, controllers: str) -> None:
    """Show the configuration of controllers."""
    for address, config in (await admin.controller_config(controllers)).items():
        out.say(f"============{address}============")
        out.record(dict(sorted(config.items())))


@commands.add("updateControllerConfig")
@_controllers
@click.option("-k", "--key", required=True, help="The name of the option.")
@click.option("-v", "--value", required=True, help="Its new value.")
async def update_controller_config(admin: Admin, out: Output, *, controllers: str, key: str, value: str) -> None:
    """Change the configuration of controllers at run time: of each one that -a names."""
    await admin.update_controller_config(controllers, {key: value})
    out.say(f"update controller config success! [{controllers}]\n{key} : {value}")
    if out.as_json:
        out.record({"key": key, "value": value, "controllers": controllers.split(";")})
