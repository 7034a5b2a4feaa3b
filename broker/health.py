"""Reasons why a broker is not ready, and notes that do not affect readiness, for /readyz and ``mqbroker health``."""

from collections.abc import Iterator
from typing import Final

from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.services.transaction.check import TransactionalMessageCheckService
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.store.message_store import Flag, MessageStore
from trimq.protocol.native import NativeExtension
from trimq.remoting.http.health import Reason

RECOVERING: Final = "recovering"
DISK_FULL: Final = "disk_full"
READ_ONLY: Final = "read_only"
NO_NAME_SERVER: Final = "no_name_server"
BROKER_ID_CONFLICT: Final = "broker_id_conflict"
LOG_FILES_HELD: Final = "log_files_held"
PENDING_DELETED: Final = "pending_messages_deleted"
RUNS: Final = "runs"
NATIVE_FAILED: Final = "native_failed"
TIMER_BROKEN: Final = "timer_broken"
TIMED_MESSAGES_LOST: Final = "timed_messages_lost"
HALF_MESSAGES_UNREADABLE: Final = "half_messages_unreadable"
HALF_MESSAGES_LOST: Final = "half_messages_lost"
TIMED_MESSAGES_UNSERVED: Final = "timed_messages_unserved"
REPLICAS_MISSING: Final = "replicas_missing"
MASTER_SILENT: Final = "master_silent"
REPLICATION: Final = "replication"

_MIB: Final = 1 << 20
_SLAVES: Final = 16
"""Slaves that a note lists."""
_DISK: Final = Flag.DISK_FULL | Flag.LOGIC_DISK_FULL | Flag.NO_SPACE


def store_reasons(store: MessageStore) -> Iterator[Reason]:
    """One reason while the store recovers, and one for each refusal of reads or writes."""
    report = store.recovering
    if report is not None:
        share = f" ({100 * report.bytes_done // report.bytes_total} %)" if report.bytes_total else ""
        done, total = report.bytes_done / _MIB, report.bytes_total / _MIB
        text = f"the store is being recovered: {done:.0f} of {total:.0f} MiB of the commit log read{share}"
        yield Reason(RECOVERING, text)
    for flag, text in store.refusals():
        if flag is Flag.SLAVE:
            continue  # it is what it shall be
        yield Reason(_code_of(flag), text)


def _code_of(flag: Flag) -> str:
    if flag is Flag.REPLICAS:
        return REPLICAS_MISSING
    return DISK_FULL if flag & _DISK else READ_ONLY


def replication_reasons(store: MessageStore) -> Iterator[Reason]:
    """A slave that has heard nothing right of its master for longer than haHousekeepingInterval."""
    if store.replication.client is None:
        return
    state = store.replication.client.state()
    if state.silent > store.replication.ha_config.silence:
        where, why = f" {state.master}", state.error or "it is silent"
        if not state.master:
            where, why = "", "no name server says where it is"
        text = f"this slave has got nothing right from its master{where} for {state.silent:.0f} s: {why}"
        yield Reason(MASTER_SILENT, text)


def replication_notes(store: MessageStore) -> Iterator[Reason]:
    """The role; a master's slaves, and how far each is behind; a slave's master, and how far the slave is behind it."""
    role = store.replication.config.broker_role.value
    if store.replication.ha is not None:
        state = store.replication.ha.state()
        text = f"{role}: {len(state.slaves)} slave(s), {state.in_sync} copies in sync, a message needs {state.needed}"
        yield Reason(REPLICATION, text)
        if (leadership := store.replication.leadership) is not None:
            lease = "with a lease" if leadership.holds() else "WITHOUT A LEASE: nothing is acknowledged"
            members = ", ".join(map(str, sorted(leadership.members)))
            who = f"broker id {leadership.broker_id}, master of epoch {leadership.epoch}, {lease}"
            yield Reason(REPLICATION, f"{who}; SyncStateSet: {members}")
        for slave in state.slaves[:_SLAVES]:
            sync = "in sync" if slave.in_sync else "not in sync"
            behind = f"{slave.behind} bytes, {slave.behind_seconds:.0f} s behind"
            yield Reason(REPLICATION, f"slave {slave.address}: {sync}, {behind}")
    if store.replication.client is not None:
        mine = store.replication.client.state()
        where = f"{'connected with' if mine.connected else 'not connected with'} {mine.master or 'any master'}"
        error = f"; last error: {mine.error}" if mine.error else ""
        yield Reason(REPLICATION, f"{role}: {where}, {mine.lag} bytes, {mine.lag_seconds:.0f} s behind{error}")


def log_hold_notes(store: MessageStore) -> Iterator[Reason]:
    """Files of the log that are kept for pending messages, and pending messages that were deleted with a file."""
    holds = store.log_holds
    if holds.files_held:
        text = (
            f"{holds.files_held} expired files of the commit log are kept, because they hold messages that are pending"
            " or whose end is not durable yet"
        )
        yield Reason(LOG_FILES_HELD, text)
    for name, count in holds.deleted.items():
        if count:
            text = f"{count} pending {name} were deleted since the start, because the disk was too full"
            yield Reason(PENDING_DELETED, f"{text} (diskSpaceCleanForciblyRatio)")


def tier_notes(store: MessageStore) -> Iterator[Reason]:
    """Why nothing is uploaded to the tier. The broker is ready all the same: what waits stays on the local disk."""
    trouble = store.tier_trouble()
    if trouble is not None:
        yield Reason(trouble.code, trouble.text)


def name_server_reasons(registration: BrokerOuterAPI) -> Iterator[Reason]:
    """Reasons why clients cannot find this broker: no name server was reached, or another broker took its name and id.

    One reached name server is enough. A broker that is configured without name servers is ready.
    """
    reached, conflicts = registration.reached(), registration.conflicts()
    for namesrv, other in conflicts.items():
        text = f"the name server {namesrv} lists the broker at {other} under this brokerName and brokerId: change one"
        yield Reason(BROKER_ID_CONFLICT, text)
    if reached and not any(reached.values()) and not conflicts:
        yield Reason(NO_NAME_SERVER, f"no name server could be reached: {', '.join(reached)}")


def native_notes(native: NativeExtension) -> Iterator[Reason]:
    """Whether the native extension serves, or Python and why. A failed extension leaves the broker ready."""
    yield Reason(RUNS, native.status if native.is_on else f"python ({native.reason})")
    if native.has_failed:
        text = "the native extension has failed: Python serves until the next restart, correctly but slower"
        yield Reason(NATIVE_FAILED, text)


def timer_notes(timer: TimerMessageService) -> Iterator[Reason]:
    """Timed messages that are not or could not be delivered, and whether the timer writes no checkpoints any more."""
    if timer.unserved:
        text = f"{timer.unserved} timed messages wait, and keep files of the commit log"
        yield Reason(TIMED_MESSAGES_UNSERVED, f"{text}: timerWheelEnable=false does not deliver them")
    if timer.is_broken:
        text = "the timer's log could not be synced: check the device. After a restart some timed messages come again"
        yield Reason(TIMER_BROKEN, text)
    lost = timer.puts.deleted + timer.puts.dropped
    if lost:
        yield Reason(TIMED_MESSAGES_LOST, f"{lost} timed messages could not be delivered since the start: see the log")


def transaction_notes(
    transactions: TransactionalMessageService, checks: TransactionalMessageCheckService
) -> Iterator[Reason]:
    """Half messages that cannot be read now, and those that were lost before they were ended."""
    if checks.unreadable:
        text = f"{checks.unreadable} half messages cannot be read: check the device. They wait, with their log files"
        yield Reason(HALF_MESSAGES_UNREADABLE, text)
    lost = transactions.counters.lost
    if lost:
        yield Reason(
            HALF_MESSAGES_LOST, f"{lost} half messages were lost since the start, before their end: see the log"
        )
