"""mqadmin: the command for a change of roles: what would be lost if a slave became the master now, and the steps.

The roles themselves change by configuration and restart: no command of any broker changes them.
"""

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final

import click

from trimq.client.admin import Admin
from trimq.client.admin.models import queue_table
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.mqadmin.shell import Commands, Output, show_time
from trimq.client.routes import MASTER_ID
from trimq.protocol import lenient_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.headers.admin import TopicRequestHeader

commands: Commands = Commands()

_MANY_TOPICS: Final = 1000
"""Messages are counted in up to this number of topics: each costs two requests."""
_HA_PORT: Final = "10912"
_COPIED: Final = ("inSyncReplicas", "minInSyncReplicas", "enableAutoInSyncReplicas")
"""Keys of the master that a new master needs with the same values."""
_ROLE: Final = "brokerRole"
_MASTERS: Final = ("SYNC_MASTER", "ASYNC_MASTER")
_ALLOWED: Final = "haAllowedAddresses"
_READS: Final = "slaveReadEnable"


@dataclass
class Replica:
    """What a broker says about its log. ``end`` is the end of it; ``readable`` the end of what is acknowledged."""

    address: str
    status: dict[str, Any]
    info: dict[str, str]
    config: dict[str, str]
    end: int = 0
    readable: int = 0

    @property
    def client(self) -> dict[str, Any]:
        """A slave's view of its master."""
        found: dict[str, Any] = self.status.get("haClientRuntimeInfo") or {}
        return found


@dataclass
class Change:
    """A slave that shall become the master, the master (None if it does not answer), and other slaves' ends."""

    slave: Replica
    master: Replica | None = None
    master_address: str = ""
    why_unknown: str = ""
    others: dict[str, int] = field(default_factory=dict)
    connected_to: dict[str, str] = field(default_factory=dict)
    """haMasterAddress of the other slaves that have it."""
    silent: dict[str, str] = field(default_factory=dict)
    """The other slaves that do not answer, and why."""
    messages: int | None = None
    topics: int = 0

    @property
    def master_config(self) -> dict[str, str]:
        """The master's configuration; if it does not answer, what the slave remembers of it."""
        if self.master is not None:
            return self.master.config
        known = {key: self.slave.info.get(f"master{key[0].upper()}{key[1:]}") for key in (_ROLE, *_COPIED)}
        return {key: value for key, value in known.items() if value}

    @property
    def bytes_lost(self) -> int | None:
        """Bytes of the log that only the master has; None if it does not answer."""
        return max(0, self.master.end - self.slave.end) if self.master is not None else None

    def losses(self) -> list[str]:
        """Each reason why messages would be lost, or why that is not known; empty if nothing would be lost."""
        found = [*self._of_master()]
        ahead = {address: end - self.slave.end for address, end in self.others.items() if end > self.slave.end}
        found += [
            f"the slave {address} has {more} bytes that this one does not have" for address, more in ahead.items()
        ]
        if self.master is None:
            found += [f"unknown: the slave {address} does not answer ({why})" for address, why in self.silent.items()]
        if error := self.slave.info.get("slaveError"):
            found.append(f"this slave does not follow its master: {error}")
        return found

    def _of_master(self) -> list[str]:
        if self.master is None:
            return [self._unknown()]
        if self.slave.end > self.master.end:
            more = self.slave.end - self.master.end
            return [f"this slave has {more} bytes more than its master, so their logs differ: see the fault model"]
        if not self.bytes_lost:
            return []
        acknowledged = max(0, min(self.master.readable, self.master.end) - self.slave.end)
        text = f"{self.bytes_lost} bytes are only on the master, {acknowledged} of them acknowledged"
        if self.messages is not None:
            text += f": {self.messages} messages of {self.topics} topics"
        return [text]

    def _unknown(self) -> str:
        who = f"the master {self.master_address}" if self.master_address else "the master"
        heard = int(self.slave.client.get("lastReadTimestamp") or 0)
        since = f"all that it has stored since {show_time(heard)}" if heard else "this slave has never heard of it"
        text = f"unknown: {who} does not answer ({self.why_unknown}); {since}"
        known = int(self.slave.info.get("masterCommitLogMaxOffset") or 0)
        if known > self.slave.end:
            text += f", and {known - self.slave.end} bytes that it had before"
        return text


async def _replica(admin: Admin, address: str) -> Replica:
    """Ask a broker. Raises RocketMQError."""
    status = await admin.ha_status(address)
    info = await admin.runtime_info(address)
    found = Replica(address, status, info, await admin.broker_config(address))
    key = "masterCommitLogMaxOffset"
    found.end = int(status[key] if status.get("master") else found.client.get("maxOffset") or 0)
    # RocketMQ acknowledges, and lets read, whatever is in its log.
    found.readable = int(info.get("commitLogReadableOffset") or found.end)
    return found


async def _members(admin: Admin, name: str) -> dict[int, str]:
    """The addresses of the brokers of one name that the name servers list."""
    brokers = (await admin.cluster_info()).broker_addr_table
    return {int(number): address for number, address in brokers[name].broker_addrs.items()} if name in brokers else {}


async def _look(admin: Admin, slave_address: str, master_address: str | None) -> Change:
    """Ask the slave, the other slaves and the master, in this order: what it stores meanwhile counts as lost."""
    slave = await _replica(admin, slave_address)
    if slave.status.get("master"):
        raise UsageError(f"{slave_address} is a master, not a slave")
    change = Change(slave, master_address=master_address or "")
    try:
        members = await _members(admin, slave.config.get("brokerName", ""))
    except RocketMQError as error:
        members, change.why_unknown = {}, f"no name server says where it is: {error.text}"
    if master_address is None:
        change.master_address = members.get(int(MASTER_ID), "")
    for number, address in sorted(members.items()):
        if number != int(MASTER_ID) and address not in (slave_address, change.master_address):
            try:
                status = await admin.ha_status(address)
                connects_to = (await admin.broker_config(address)).get("haMasterAddress")
            except RocketMQError as error:
                change.silent[address] = error.text
                continue
            change.others[address] = int((status.get("haClientRuntimeInfo") or {}).get("maxOffset") or 0)
            if connects_to:
                change.connected_to[address] = connects_to
    if not change.master_address:
        change.why_unknown = change.why_unknown or "no name server lists it; give its address with -m"
        return change
    try:
        master = await _replica(admin, change.master_address)
    except RocketMQError as error:
        change.why_unknown = error.text
        return change
    if not master.status.get("master"):
        raise UsageError(f"{change.master_address} is a slave too: give the master's address with -m")
    change.master = master
    if change.bytes_lost:
        try:
            await _count(admin, change, master)
        except RocketMQError:
            change.messages = None  # the bytes say enough
    return change


async def _count(admin: Admin, change: Change, master: Replica) -> None:
    """Count the messages that only the master has, unless there are too many topics."""
    topics = await admin.topic_configs(master.address)
    if len(topics) > _MANY_TOPICS:
        return
    missing: dict[str, int] = {}
    for topic in topics:
        mine, theirs = await _ends(admin, change.slave.address, topic), await _ends(admin, master.address, topic)
        missing[topic] = sum(max(0, end - mine.get(queue, 0)) for queue, end in theirs.items())
    change.messages = sum(missing.values())
    change.topics = sum(1 for count in missing.values() if count)


async def _ends(admin: Admin, address: str, topic: str) -> dict[int, int]:
    """The next offset of each queue of a topic; empty if the broker does not know the topic."""
    try:
        reply = await admin.client.request(address, RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic=topic))
    except UsageError:
        return {}
    table = queue_table(lenient_json.loads(bytes(reply.body)).get("offsetTable"))
    return {queue.queue_id: int(value["maxOffset"]) for queue, value in table.items()}


@dataclass
class Lines:
    """What to write into the configurations. ``notes``: what the operator has to decide, for the new master."""

    leader: dict[str, str]
    follower: dict[str, str]
    notes: list[str] = field(default_factory=list)


def _lines(change: Change) -> Lines:
    """The lines for the configuration of the new master, and for that of the new slave."""
    slave, master = change.slave.config, change.master_config
    port = slave.get("haListenPort") or master.get("haListenPort") or _HA_PORT
    lines = Lines({}, {_ROLE: "SLAVE", "brokerId": slave.get("brokerId") or "1"})
    leader = lines.leader
    if master.get(_ROLE) in ("ASYNC_MASTER", "SYNC_MASTER"):
        leader[_ROLE] = master[_ROLE]
    else:
        lines.notes += ["It is not known which of them the old master was:", *(f"{_ROLE}={role}" for role in _MASTERS)]
    leader |= {"brokerId": MASTER_ID, "haListenPort": port}
    leader |= {key: master[key] for key in _COPIED if master.get(key) and master[key] != slave.get(key)}
    _add_read_enable(change, lines)
    _add_addresses(change, lines)
    return lines


def _add_read_enable(change: Change, lines: Lines) -> None:
    """Reads from the slave go on as before if each role keeps its value."""
    if change.master is None:
        return
    of_slave, of_master = change.slave.config.get(_READS), change.master.config.get(_READS)
    if of_slave and of_master and of_slave != of_master:
        lines.leader[_READS], lines.follower[_READS] = of_master, of_slave


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _add_addresses(change: Change, lines: Lines) -> None:
    """Options with addresses: those of the old master, and in its configuration, are wrong after the change."""
    slave, master = change.slave.config, change.master
    if slave.get("haMasterAddress"):
        lines.leader["haMasterAddress"] = ""
    if master is not None and master.config.get("haMasterAddress"):
        lines.follower["haMasterAddress"] = ""
    of_master = master.config.get(_ALLOWED) if master is not None else None
    if not (of_master or slave.get(_ALLOWED) or master is None):
        return
    if of_master or slave.get(_ALLOWED):
        members = (change.master_address, *change.others, *change.silent)
        hosts = [address.rpartition(":")[0].strip("[]") for address in members if address]
        lines.leader[_ALLOWED] = ";".join(host for host in hosts if _is_ip(host))
    lines.notes.append(
        f"{_ALLOWED} has to admit the slaves of this new master: the old master, and the other slaves."
        if lines.leader.get(_ALLOWED)
        else f"If the old master had {_ALLOWED}: here it has to admit the old master, and the other slaves."
    )


@commands.add("switchRole")
@click.option("-b", "--brokerAddr", "slave", required=True, help="The slave that shall become the master.")
@click.option("-m", "--masterAddr", "master", help="Its master. Default: as a name server says.")
@click.option("--acceptLoss", "accept", is_flag=True, help="Show the steps even if messages would be lost.")
async def switch_role(admin: Admin, out: Output, *, slave: str, master: str | None, accept: bool) -> None:
    """Show what would be lost if a slave became the master now, and how to do it. Changes nothing."""
    change = await _look(admin, slave, master)
    losses = change.losses()
    lines = _lines(change)
    lost = {"bytesLost": change.bytes_lost, "messagesLost": change.messages if losses else 0, "losses": losses}
    ends = {"slaveEnd": change.slave.end, "masterEnd": change.master.end if change.master is not None else None}
    if out.as_json:
        written = {"newMaster": lines.leader, "newSlave": lines.follower, "notes": lines.notes}
        others = {"silentSlaves": list(change.silent), "haMasterAddresses": change.connected_to}
        out.record({"slave": slave, "master": change.master_address or None, **ends, **lost, **written, **others})
    else:
        _show(out, change, losses)
    if losses and not accept:
        out.finish()
        raise RocketMQError("messages would be lost, or it is not known; --acceptLoss shows the steps all the same")
    _steps(out, change, lines, whole=not losses)


def _show(out: Output, change: Change, losses: list[str]) -> None:
    master = change.master
    out.say(f"slave  {change.slave.address}: its log ends at {change.slave.end}")
    if master is not None:
        out.say(f"master {master.address}: its log ends at {master.end}, acknowledged up to {master.readable}")
    for text in losses:
        out.say(f"LOST: {text}")
    if master is not None:
        for address, why in change.silent.items():
            out.say(f"NOT ASKED: the slave {address} does not answer: {why}")
    if not losses:
        out.say("Nothing would be lost: the slave has all of its master's log.")


def _steps(out: Output, change: Change, lines: Lines, *, whole: bool) -> None:
    slave, master, leader = change.slave.address, change.master, lines.leader
    steps = []
    if master is not None:
        perm = f"mqadmin updateBrokerConfig -b {master.address} -k brokerPermission -v"
        out_of_routes = (
            f"Take the master out of the routes: {perm} 4\n   It stores what still arrives: clients read the route "
            f"every 30 s. Wait until `mqadmin brokerStatus -b {master.address}`\n   shows no more sends (putTps)."
        )
        stop = (
            "Stop the master in order, and wait until it has ended: it waits some seconds until its slaves have all of "
            "its log.\n   If it logs slaves_lack_messages, start it, and begin again."
        )
        steps = [out_of_routes, "Repeat this command until nothing would be lost.", stop]
    else:
        steps = ["Make sure that the old master does not run, and does not start by itself."]
    notes = "".join(f"\n   # {note}" for note in lines.notes)
    steps.append(f"Stop the slave {slave}, write into its configuration, and start it:\n{_text(leader)}{notes}")
    if change.master_config.get(_ROLE) != "ASYNC_MASTER":
        steps[-1] += "\n   As a SYNC_MASTER it takes no sends until a slave is connected."
    before = "" if whole else "Empty the store of the old master: its log goes on where the new one differs. "
    steps.append(f"{before}Write into the old master's configuration, and start it:\n{_text(lines.follower)}")
    if master is not None:
        steps[-1] += "\n   brokerPermission=6"
    if whole:
        steps.append(
            "If it logs slave_diverged, or the new master slave_ahead_of_master, empty the store of the old "
            "master,\n   and start it again. Not for master_lost: then it gets no connection. If the new master logs\n"
            f"   slave_refused, see its {_ALLOWED}."
        )
    host = slave.rpartition(":")[0]
    for address, old in change.connected_to.items():
        steps.append(
            f"Write into the configuration of the slave {address} ({old} is the old master), and start it again:\n"
            f"   haMasterAddress={host}:{leader['haListenPort']}"
        )
    out.say("")
    for number, text in enumerate(steps, 1):
        out.say(f"{number}. {text}")


def _text(lines: dict[str, str]) -> str:
    return "\n".join(f"   {key}={value}" for key, value in lines.items())
