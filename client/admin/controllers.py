"""Administration of controllers: the masters that they elect, the SyncStateSets, and the epochs of brokers' logs."""

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from msgspec import Struct

from trimq.client.admin.base import AdminBase, each, first_that_knows, properties_of, text_of
from trimq.client.errors import NotStoredError, PerhapsStoredError, RocketMQError, UnreachableError, UsageError
from trimq.protocol.body import (
    BrokerReplicasInfo,
    ElectMasterResponseBody,
    EpochEntryCache,
    ReplicasInfo,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.headers.controller import (
    CleanControllerBrokerDataRequestHeader,
    ElectMasterRequestHeader,
    ElectMasterResponseHeader,
)

T = TypeVar("T")

_NO_CONTROLLER: Final = "no controller: give the address of one, host:port"


class ControllerMetadata(Struct):
    """What a controller knows of the controllers.

    ``leader_address`` is empty while none of them leads. Each of TriMQ's leads. ``peers`` are all controllers, as
    ``id:host:port``.
    """

    address: str
    group: str = ""
    leader_id: str = ""
    leader_address: str = ""
    is_leader: bool = False
    peers: list[str] = []


class Election(Struct):
    """The master after an election. ``changed`` is false if the elected broker was the master before.

    ``brokers`` has the addresses of all brokers of the name by id; Apache's controller gives none if nothing changed.
    """

    changed: bool
    master_id: int | None
    master_address: str
    master_epoch: int
    set_epoch: int
    brokers: dict[int, str]


class ControllerAdmin(AdminBase):
    """Controllers. ``controllers`` is one address or several, as ``host:port;host:port`` or as an iterable.

    Requests are sent to the one that leads; the addresses are tried in their order until one answers.
    """

    async def controller_metadata(self, controllers: str | Iterable[str]) -> ControllerMetadata:
        """What the first controller that answers knows of the controllers. Raises the last one's error if none does.

        >>> async def example(admin: "Admin") -> str:
        ...     return (await admin.controller_metadata("127.0.0.1:9878")).leader_address
        """
        return await first_that_knows(controller_addresses(controllers), self._metadata)

    async def sync_state(self, controllers: str | Iterable[str], names: Iterable[str]) -> dict[str, ReplicasInfo]:
        """Master, epochs, and the brokers in the SyncStateSet and outside of it, by broker name.

        Names that the controllers do not know are missing.

        >>> async def example(admin: "Admin") -> str | None:
        ...     return (await admin.sync_state("127.0.0.1:9878", ["broker-a"]))["broker-a"].master_address
        """
        body = encode_json(list(names))

        async def ask(address: str) -> dict[str, ReplicasInfo]:
            reply = await self.client.request(address, RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, {}, body)
            return decode_json(reply.body or b"{}", BrokerReplicasInfo).replicas_info_table

        return await self._ask_leader(controllers, ask)

    async def epochs(self, address: str) -> EpochEntryCache:
        """The epochs of a broker's log, by the broker's address, and the end of its log.

        Raises an error if the broker is not in controller mode.

        >>> async def example(admin: "Admin") -> int:
        ...     return (await admin.epochs("127.0.0.1:10911")).epoch_list[-1].epoch
        """
        return await self._ask(address, RequestCode.GET_BROKER_EPOCH_CACHE, None, EpochEntryCache)

    async def elect_master(
        self, controllers: str | Iterable[str], cluster: str, broker_name: str, broker_id: int
    ) -> Election:
        """Makes a broker the master, by the id that the controllers have given it.

        Raises NotStoredError (CONTROLLER_ELECT_MASTER_FAILED) if the broker is not alive, or if it is not in the
        SyncStateSet and the controllers' enableElectUncleanMaster is false. If it is true, messages can be lost.

        >>> async def example(admin: "Admin") -> int:
        ...     return (await admin.elect_master("127.0.0.1:9878", "DefaultCluster", "broker-a", 2)).master_epoch
        """
        header = ElectMasterRequestHeader(
            broker_name=broker_name,
            cluster_name=cluster,
            broker_id=broker_id,
            designate_elect=True,
            invoke_time=int(time.time() * 1000),
        )
        kept = ResponseCode.CONTROLLER_MASTER_STILL_EXIST

        async def ask(address: str) -> Election:
            code = RequestCode.CONTROLLER_ELECT_MASTER
            reply = await self.client.request(address, code, header, accept=(ResponseCode.SUCCESS, kept))
            found = reply.header(ElectMasterResponseHeader)
            group = decode_json(reply.body or b"{}", ElectMasterResponseBody).broker_member_group
            return Election(
                changed=reply.code != kept,
                master_id=found.master_broker_id,
                master_address=found.master_address or "",
                master_epoch=found.master_epoch or 0,
                set_epoch=found.sync_state_set_epoch or 0,
                brokers={int(number): at for number, at in (group.broker_addrs if group else {}).items()},
            )

        return await self._ask_leader(controllers, ask)

    async def clean_broker_metadata(
        self,
        controllers: str | Iterable[str],
        broker_name: str,
        *,
        cluster: str | None = None,
        broker_ids: Iterable[int] = (),
        living: bool = False,
    ) -> None:
        """Lets the controllers forget brokers of a name, by their ids; without ids all of them.

        ``cluster`` is needed unless ``living``, which lets them forget brokers that are alive too. Raises UsageError
        for a broker that is alive or not known.

        >>> async def gone_for_good(admin: "Admin") -> None:
        ...     await admin.clean_broker_metadata("127.0.0.1:9878", "broker-a", cluster="c", broker_ids=[2])
        """
        header = CleanControllerBrokerDataRequestHeader(
            broker_name=broker_name,
            cluster_name=cluster,
            broker_controller_ids_to_clean=";".join(str(number) for number in broker_ids) or None,
            is_clean_living_broker=living,
            invoke_time=int(time.time() * 1000),
        )

        async def ask(address: str) -> None:
            await self.client.request(address, RequestCode.CLEAN_BROKER_DATA, header)

        await self._ask_leader(controllers, ask)

    async def controller_config(self, controllers: str | Iterable[str]) -> dict[str, dict[str, str]]:
        """The configuration of each of these controllers, by address.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return sorted(await admin.controller_config("127.0.0.1:9878;127.0.0.1:9888"))
        """

        async def ask(address: str) -> dict[str, str]:
            return properties_of((await self.client.request(address, RequestCode.GET_CONTROLLER_CONFIG, {})).body)

        return await each(controller_addresses(controllers), ask)

    async def update_controller_config(self, controllers: str | Iterable[str], changes: dict[str, str]) -> None:
        """Changes the configuration of each of these controllers at run time: they do not tell each other.

        >>> async def example(admin: "Admin") -> None:
        ...     await admin.update_controller_config("127.0.0.1:9878", {"enableElectUncleanMaster": "false"})
        """
        for address in controller_addresses(controllers):
            await self.client.request(address, RequestCode.UPDATE_CONTROLLER_CONFIG, {}, text_of(changes))

    async def _metadata(self, address: str) -> ControllerMetadata:
        fields = (await self.client.request(address, RequestCode.CONTROLLER_GET_METADATA_INFO, {})).ext_fields()
        return ControllerMetadata(
            address=address,
            group=fields.get("group", ""),
            leader_id=fields.get("controllerLeaderId", ""),
            leader_address=fields.get("controllerLeaderAddress", ""),
            is_leader=fields.get("isLeader") == "true",
            peers=[peer for peer in fields.get("peers", "").split(";") if peer],
        )

    async def _ask_leader(self, controllers: str | Iterable[str], ask: Callable[[str], Awaitable[T]]) -> T:
        """Calls ``ask`` with the address of the controller that leads.

        One that leads itself is called by the address it was asked at: the one that it names may be of another network.
        Goes on with the next address if a controller is not reached, or does not lead after all. Raises the last error.
        """
        error: RocketMQError | None = None
        for address in controller_addresses(controllers):
            try:
                metadata = await self._metadata(address)
            except (UnreachableError, PerhapsStoredError) as failure:
                error = failure
                continue
            leader = address if metadata.is_leader else metadata.leader_address
            if not leader:
                error = NotStoredError("no controller leads now", address=address)
                continue
            try:
                return await ask(leader)
            except RocketMQError as failure:
                if failure.code != ResponseCode.CONTROLLER_NOT_LEADER and not isinstance(failure, UnreachableError):
                    raise
                error = failure
        raise error or UsageError(_NO_CONTROLLER)


def controller_addresses(controllers: str | Iterable[str]) -> list[str]:
    """The address of each controller. Raises UsageError if there is none, or if one is not ``host:port``.

    >>> controller_addresses("127.0.0.1:9878; 127.0.0.1:9888")
    ['127.0.0.1:9878', '127.0.0.1:9888']
    """
    parts = controllers.split(";") if isinstance(controllers, str) else controllers
    found = [part.strip() for part in parts if part.strip()]
    for address in found:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"the controller address {address!r} is not of the form host:port")
    if not found:
        raise UsageError(_NO_CONTROLLER)
    return found


def common_end(one: EpochEntryCache, other: EpochEntryCache) -> int:
    """The offset up to which two logs are the same: the end of the last epoch that both have from the same offset on.

    0 if they have none in common.

    >>> from trimq.protocol.body import EpochEntry
    >>> old = EpochEntryCache(epoch_list=[EpochEntry(epoch=1, start_offset=0)], max_offset=500)
    >>> new = EpochEntryCache(
    ...     epoch_list=[EpochEntry(epoch=1, start_offset=0, end_offset=300), EpochEntry(epoch=2, start_offset=300)],
    ...     max_offset=900,
    ... )
    >>> common_end(old, new)
    300
    """
    others = {entry.epoch: entry for entry in other.epoch_list}
    end = 0
    for entry in one.epoch_list:
        match = others.get(entry.epoch)
        if match is not None and match.start_offset == entry.start_offset:
            end = min(entry.end_offset, one.max_offset, match.end_offset, other.max_offset)
    return end
