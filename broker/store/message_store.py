"""The entry point of the store: puts, gets, queries and offsets for the processors; opening for the controller.

Source: RocketMQ's DefaultMessageStore.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, closing
from typing import Any, Final, NamedTuple

import structlog
import trio

from trimq.broker.config import ControllerModeConfig, FlushDiskType, MessageStoreConfig, ReplicationConfig
from trimq.broker.store.clean import CleanService
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue, StoreLoadError
from trimq.broker.store.disk.memory import log_memory, memory_limit
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.disk.store_lock import AbortFile, StoreInUseError, StoreLock
from trimq.broker.store.dispatch.dispatcher import MessageArriving, StoreDispatcher
from trimq.broker.store.dispatch.reput import ReputMessageService
from trimq.broker.store.durability.group_transfer import GroupTransferService
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.durability.write_path import WritePath
from trimq.broker.store.index.index_file import IndexShape
from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.topic_queue import TopicIllegalError, TopicQueue
from trimq.broker.store.log_holds import LogHolds, PendingMessages
from trimq.broker.store.queue.consume_queue import ConsumeQueue, QueueShape
from trimq.broker.store.queue.consume_queue_flush import FlushConsumeQueueService
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_clean import QueueCleaner
from trimq.broker.store.queue_calls import QueueCalls
from trimq.broker.store.read.get_message import MessageGetter
from trimq.broker.store.read.log_reader import Visit, read_log
from trimq.broker.store.read.query import MessageFinder
from trimq.broker.store.recovery.checkpoint import CheckpointService, StoreCheckpoint
from trimq.broker.store.recovery.failed_sync_marker import FailedSyncMarker
from trimq.broker.store.recovery.recovery import RecoveryReport, StoreRecovery
from trimq.broker.store.replication.auto_switch_service import AutoSwitchHAService
from trimq.broker.store.replication.epochs import EpochFileCache
from trimq.broker.store.replication.follower import StoreFollower
from trimq.broker.store.replication.ha_client import Begin, HAClient, MasterView
from trimq.broker.store.replication.ha_connection import SlaveState
from trimq.broker.store.replication.leadership import Leadership
from trimq.broker.store.replication.store_replication import StoreReplication
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.timer.recovery import LogState, TimerRecovery
from trimq.broker.store.timer.timer_store import DueTimers, NewTimer, TimerStore
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.record import decode_head
from trimq.protocol.timer_layout import SLOTS, snapped_precision
from trimq.protocol.topic_rules import TIMER_TOPIC
from trimq.remoting.runtime.clock import Clock, SystemClock
from trimq.remoting.runtime.durations import Durations

__all__ = [
    "Begin",
    "ConsumeQueue",
    "DueTimers",
    "Flag",
    "HAClient",
    "Leadership",
    "MappedFile",
    "MessageStore",
    "NewTimer",
    "PendingMessages",
    "SlaveState",
    "StoreInUseError",
    "StoreLoadError",
    "SyncPlace",
    "TimerStore",
    "TopicIllegalError",
    "TopicQueue",
]

SHUTDOWN_SECONDS: Final = 5.0
"""How long closing waits for the dispatch to catch up (as in RocketMQ)."""

_LOOKS: Final = 500
_LOOK_SECONDS: Final = 0.002
"""How often, and after which pauses, it is looked whether a record has got into its queue."""

_log = structlog.get_logger(__name__)


async def _already_durable() -> bool:
    """After its recovery all of the commit log is on disk, and the timer has delivered nothing yet."""
    return True


class StoreWaits(NamedTuple):
    """Durations of syncs of the log; durations for which appends waited for space; how long (s) the first waits now.

    ``queue``: number of waiting appends; ``busy``: number of appends refused because they waited too long.
    """

    syncs: Durations
    appends: Durations
    held: float
    queue: int
    busy: int


class MessageStore(QueueCalls):
    """One store. ``async with store.opened():`` runs it; ``stats`` and ``flags`` may be read at any time.

    Puts, gets and queries are those of InMemoryCalls, topics and queues those of QueueCalls.
    """

    def __init__(  # noqa: PLR0913, PLR0915 - it makes all parts of a store
        self,
        config: MessageStoreConfig,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        sync_place: SyncPlace = SyncPlace.AUTO,
        accept_missing_log: bool = False,
        timer_slots: int = SLOTS,
        replication: ReplicationConfig | None = None,
        leadership: Leadership | None = None,
        controller_mode: ControllerModeConfig | None = None,
        truncate_at: int | None = None,
    ) -> None:
        """``accept_missing_log``: start with an empty log even if the checkpoint knows one whose files are missing.

        ``timer_slots``: slots of the timer's wheel, for tests; with another number RocketMQ refuses the file.
        ``leadership``: controllers have assigned the role, ``controller_mode`` has the options of that.
        ``truncate_at``: on a slave, the log is its master's up to here. What follows is erased before anything else.
        """
        self.config = config
        syncs = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self.disk = disk or RealDisk()
        self.clock = clock or SystemClock()
        self.root = str(config.root)
        mode = controller_mode or ControllerModeConfig()
        epochs = None
        if leadership is not None:
            epochs = EpochFileCache(self.disk, mode.store_path_epoch_file or f"{self.root}/epochFileCheckpoint")
        self.replication = StoreReplication(
            replication or ReplicationConfig(), syncs=syncs, leadership=leadership, epochs=epochs, mode=mode
        )
        """What the role adds."""
        self._truncate_at = truncate_at
        self.flags = RunningFlags()
        self.stats = StoreStats(self.clock.wall_ms())
        self.recovered: RecoveryReport | None = None
        """What the start found and did."""
        self.recovering: RecoveryReport | None = None
        """The progress of the recovery while it runs."""
        self._held_places = {}
        self.on_overdue: list[Callable[[MappedFile], None]] = []
        """Called with a deleted file that has been read for too long (destroyMapedFileIntervalForcibly).

        Its ``is_released_by`` recognizes the ``release`` of a result that holds it.
        """
        self.on_anew: list[Callable[[str], None]] = []
        """Called with a topic whose queue was replaced: the master of the log has deleted it and created it again."""
        self.log_holds = LogHolds()
        """The services whose pending messages the cleaner keeps."""
        self._follower: StoreFollower | None = None
        self._confirmed_at_start: int | None = None
        self._sync_place = sync_place
        self._accept_missing_log = accept_missing_log
        self._abort = AbortFile(self.disk, self.root)
        self._failed_sync = FailedSyncMarker(self.disk, self.root)
        self._memory = memory_limit()
        delays = config.delay_levels_ms
        directory = str(config.commit_log_path)
        self.files = MappedFileQueue(self.disk, directory, config.mapped_file_size_commit_log)
        shape = QueueShape(config.consume_queue_file_size // UNIT_SIZE, config.mapped_file_size_commit_log)
        self.queues = ConsumeQueueStore(self.disk, self.root, shape, max_open_files=config.consume_queue_max_open_files)
        self.commit_log = CommitLog(
            self.files,
            wall_ms=self.clock.wall_ms,
            max_message_size=config.max_message_size,
            stats=self.stats,
            first_offset=self.queues.next_offset,
        )
        self.index: IndexService | None = None
        if config.message_index_enable:
            index_shape = IndexShape(config.max_hash_slot_num, config.max_index_num)
            self.index = IndexService(
                self.disk,
                self.root,
                index_shape,
                self.flags,
                wall_ms=self.clock.wall_ms,
                tags=config.index_tag_enable,
            )
        self.timer_data = self._make_timers(timer_slots)
        """Pending timed messages. Also if timerWheelEnable is false: they wait, and need the log."""
        self.dispatcher = StoreDispatcher(self.queues, self.index, self.stats, delay_ms=delays)
        self.flush_queues = FlushConsumeQueueService(self.queues, self.flags)
        self.checkpoint = StoreCheckpoint(self.disk, self.root)
        self._getter = MessageGetter(self.commit_log, self.queues, self.stats, config, self._memory)
        self._finder = MessageFinder(self.commit_log, self.queues, self.index, max_query=config.max_msgs_num_batch)
        self.find_queue = self.queues.find
        self.queue_exists = self.queues.exists
        self.peek_max_offset = self.queues.peek_next_offset
        self.get_message = self._getter.get
        self.get_message_cold = self._getter.get_cold
        self.get_in_memory = self._getter.in_memory.get
        self.get_ahead = self._getter.in_memory.ahead
        self.count_found = self._getter.in_memory.count
        self.look_properties = self._getter.in_memory.look_properties
        self.query_message = self._finder.query
        self.query_in_memory = self._finder.query_in_memory
        self.query_message_cold = self._finder.query_cold

    def _make_timers(self, slots: int) -> TimerStore:
        return TimerStore(
            self.disk,
            self.root,
            precision=snapped_precision(self.config.timer_precision_ms),
            log_file_size=self.config.mapped_file_size_timer_log,
            window=self.config.timer_roll_window_slot,
            slots=slots,
        )

    @property
    def timers(self) -> TimerStore | None:
        """What the timer's task works with; None if timerWheelEnable is false."""
        return self.timer_data if self.config.timer_wheel_enable else None

    # -- lifecycle

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["MessageStore"]:
        """Lock, recover and serve; on exit stop the parts in order and close the store cleanly.

        Raises StoreInUseError, StoreLoadError, OSError before anything is served.
        """
        with trio.CancelScope(shield=True):  # giving up midway would only make the next start longer
            lock = await self.disk.run(StoreLock.acquire, self.disk, self.root)
        try:
            path = await self._open()
            with closing(path.sync):
                async with trio.open_nursery() as nursery:
                    self._start(path, nursery)
                    try:
                        yield self
                    finally:
                        with trio.CancelScope(shield=True):
                            await self._stop(path)
                        nursery.cancel_scope.cancel()
        finally:
            self._close_files()
            lock.release()

    async def _open(self) -> WritePath:
        """Load and recover. The abort file is created before the first write to the store."""
        disk = self.disk
        abort = self._abort
        # A store without its log, or with files of a wrong size, is refused before anything below changes a file.
        clean_exit = not abort.exists()
        self.files.load()
        self.checkpoint.load()
        if self.replication.epochs is not None:
            self.replication.epochs.load()
        if not self.files.files:
            self.checkpoint.check_missing_log(self.files.directory, accept=self._accept_missing_log)
        make_durable_directory(disk, self.files.directory)
        abort.create()
        index = None if self.index is None else self.index.directory
        await self._failed_sync.repair(self.files, self.queues.directory, index)
        recovery = StoreRecovery(
            self.files,
            self.queues,
            self.flush_queues,
            self.index,
            self.checkpoint,
            self.dispatcher,
            clean_exit=clean_exit,
            check_crc=self.config.check_crc_on_recover,
            holds=self.replication.holds_back,
            cuts=self.replication.cuts,
            truncate_at=self._truncate_at,
        )
        self.recovering = recovery.report
        self.recovered = await recovery.run()
        self.recovering = None
        # After the recovery, whose syncs have made everything durable that the note refers to.
        self._failed_sync.remove()
        self.flags.on_broken = lambda flag, reason: self._failed_sync.note(flag, self.flushed_offset, reason)
        self.commit_log.last_store_timestamp = self.recovered.last_store_timestamp
        for (topic, queue_id), following in recovery.held.items():
            self.commit_log.queue(topic, queue_id).next_offset = following
        self._held_places = recovery.held_places
        log_min = self.commit_log.min_offset
        await self.replication.settle_epochs(log_min, self.recovered.position, self._truncate_at)
        knows = recovery.held_back or not self.recovered.position
        self._confirmed_at_start = self.dispatcher.position if knows else None
        ha = self.replication.make_service(
            self.commit_log, self.flags, self._transferable_offset, replicated_offset=self.dispatcher.position
        )
        path = WritePath(
            self.commit_log,
            self.dispatcher,
            self.flags,
            self.stats,
            self.config,
            memory=log_memory(self._memory),
            delay_ms=self.dispatcher.delay_ms,
            sync_place=self._sync_place,
            replicas=ha if self.replication.waits_for_slaves else None,
            slave_timeout=self.replication.slave_timeout,
        )
        self.write_path = path
        if self.replication.is_slave:
            self.flags.set(Flag.SLAVE, "this broker is a slave (brokerRole=SLAVE): send to its master")
        if ha is not None:
            path.sync.on_flushed = ha.notify
            ha.start()
        self.put_message = path.put_message
        self.put_now = path.put_now
        try:
            await self._recover_timers(self.timer_data)
        except (StoreLoadError, OSError) as error:
            if self.timers is not None:
                raise
            # Nothing serves the messages, and all of the queue counts as not read: the log is held from there.
            _log.warning("timer_files_not_read", error=str(error))
            self.timer_data.close()
            self.timer_data = self._make_timers(self.timer_data.wheel.slots)
        return path

    def step_down(self) -> None:
        """Before a close for another role: refuse puts, and answer those that wait for slaves."""
        self.flags.set(Flag.SLAVE, "this broker is not the master any more: send to the new one")
        if isinstance(self.write_path.durability, GroupTransferService):
            self.write_path.durability.abandon()

    async def finish_replication(self, seconds: float) -> list[str]:
        """Before a stop: see HAService.finish. Under SYNC_FLUSH slaves get only what is on disk."""
        ha = self.replication.ha
        if ha is None or not ha.connections:
            return []
        await self.flush()
        return await ha.finish(seconds)

    def _transferable_offset(self) -> int:
        """What slaves may get. Under SYNC_FLUSH nothing that this store could lose, and then write differently."""
        return self.flushed_offset if self.replication.syncs else self.commit_log.max_offset

    def make_client(
        self, master: MasterView, open_stream: Callable[[str, int], Awaitable[trio.abc.Stream]]
    ) -> HAClient:
        """A slave's side of replication, to be run while the store is open."""
        path = self.write_path
        self._follower = follower = StoreFollower(
            path,
            self.dispatcher,
            self._reput.wake,
            self._finder.look_cold,
            syncs=self.replication.syncs,
            confirmed_offset=self._confirmed_at_start,
        )
        return self.replication.make_client(path, follower, master, open_stream)

    def _dispatchable_offset(self) -> int:
        """What may be dispatched: on a slave in controller mode only what the master has said to be confirmed.

        So a truncation never cuts what is in a queue.
        """
        readable = self.write_path.durability.readable_offset
        if not self.replication.is_slave or self.replication.leadership is None:
            return readable
        return min(readable, self._follower.confirmed_offset) if self._follower is not None else 0

    async def _recover_timers(self, timers: TimerStore) -> None:
        """After the queues: the timer's data follows the timer's queue. Raises StoreLoadError, OSError."""
        offsets = self.min_offset(TIMER_TOPIC, 0), self.next_offset(TIMER_TOPIC, 0)
        state = LogState(self.min_phy_offset, self.commit_log.max_offset, *offsets)
        await TimerRecovery(timers, state, self._finder.look_cold, self.clock.wall_ms()).run()
        if timers.notes:
            # At once: with timers off nothing writes later. RocketMQ makes a wheel that is not there from the end of
            # the timer log only, and without a log it goes on at the checkpoint's queue offset. A failure is no reason
            # not to start: the next start repairs the same again.
            await timers.save(_already_durable, self.clock.wall_ms())

    def _start(self, path: WritePath, nursery: trio.Nursery) -> None:
        checkpoints = CheckpointService(
            self.checkpoint,
            self.dispatcher,
            self.queues,
            self.flush_queues,
            self.index,
            self.flags,
            self.config,
            path.sync.flush,
        )
        self._checkpoints = checkpoints
        self._reput = ReputMessageService(self.commit_log, self.dispatcher, self.stats, self._dispatchable_offset)
        if isinstance(path.durability, GroupTransferService):
            path.durability.on_readable = self._reput.wake
            self._reput.wake()  # what was held may be confirmed already: by a master that is the only member
        self._clean = CleanService(
            self.files,
            QueueCleaner(self.queues, self.flush_queues),
            self.index,
            self.flags,
            self.config,
            lambda: self.dispatcher.position,
            checkpoints.save,
            self.clock.wall_ms,
        )
        self._clean.holds = self.log_holds
        self._clean.last_stored_ms = lambda: self.commit_log.last_store_timestamp
        self._clean.on_overdue = self.on_overdue
        self._clean.follows_master = self.replication.is_slave
        self._clean.on_anew = self.on_anew
        if self.replication.epochs is not None:
            self._clean.on_log_min = self.replication.epochs.truncate_prefix
        if isinstance(self.replication.ha, AutoSwitchHAService):
            nursery.start_soon(self.replication.ha.watch)
        # Not slaves only: a slave that has become a SYNC_MASTER has such records among those that wait for its slaves.
        self._reput.starts_anew = self.queues.starts_anew
        self._reput.forget_queue = self._clean.forget_queue
        # Started after recovery: all of these work on a store whose log, queues and index agree.
        nursery.start_soon(self._clean.run)
        nursery.start_soon(path.run)
        nursery.start_soon(self._getter.read_ahead.run)
        nursery.start_soon(self._reput.run)
        nursery.start_soon(checkpoints.run)
        if self.index is not None:
            nursery.start_soon(self.index.run)
        nursery.start_soon(self.stats.run, self.clock)

    async def _stop(self, path: WritePath) -> None:
        """Refuse puts, dispatch the rest of the log, make all durable, write the checkpoint, remove the abort file."""
        self._getter.read_ahead.stop()
        durable = await path.stop()
        # After the last flush: under SYNC_FLUSH only durable records may be dispatched.
        with trio.move_on_after(SHUTDOWN_SECONDS):
            await self._reput.catch_up()
        # All of the log: a record that no slave has confirmed is in no queue, and a clean store has all in its queues.
        complete = durable and self.dispatcher.position >= self.commit_log.max_offset
        # Removed only if all of it succeeded: otherwise the next start must not trust the store.
        if complete and await self._checkpoints.save(clean=True) and not self.flags.is_broken:
            try:
                self._abort.remove()
            except OSError as error:  # the next start checks the store, which takes longer but does no harm
                _log.warning("abort_file_not_removed", error=str(error))
            _log.info("store_closed", log_end=self.commit_log.max_offset)
        else:
            if durable and self.replication.leadership is not None:
                await self._checkpoints.save()  # the next role begins soon, and reads the log from the mark on
            unconfirmed = self.commit_log.max_offset - self.dispatcher.position
            behind = self.dispatch_behind_bytes
            if durable and not self.flags.is_broken and not behind and unconfirmed and self.replication.holds_back:
                # All is well: what the slaves do not have yet is dispatched, or cut off, by the next start.
                _log.info("store_closed", log_end=self.commit_log.max_offset, unconfirmed=unconfirmed)
            else:
                _log.warning("store_closed_unfinished", reason=self.flags.reason, behind=behind)
        self._clean.close()
        if self.index is not None:
            await self.index.close()

    def _close_files(self) -> None:
        self.queues.close()
        self.files.close()
        self.timer_data.close()
        if self.index is not None:
            self.index.close_files()

    def set_config(self, config: MessageStoreConfig) -> None:
        """Apply the values that may change while the broker runs."""
        self.config = config
        self.commit_log.set_max_message_size(config.max_message_size)
        self._getter.limits.set_config(config)
        self._clean.config = config
        self._finder.max_query = config.max_msgs_num_batch

    def set_tier_config(self, tier: TieredStoreConfig) -> None:
        """The same of the tier, if there is one."""

    def commit_rounds(self, rounds: list[Callable[[], None]], in_round: Callable[[], bool]) -> None:
        """SYNC_FLUSH: sync at the end of each round of the reactor (its ``at_round_end`` and ``in_round``)."""
        self.write_path.durability.join_rounds(rounds, in_round)
        if self.replication.ha is not None:
            rounds.append(self.replication.ha.notify)

    def keep_unread(self, unread_from: Callable[[], int]) -> None:
        """Keep the log from the offset that ``unread_from`` returns in memory, as far as it fits."""
        self.write_path.allocator.recycling.unread_from = unread_from

    def hold_log(self, pending: PendingMessages) -> None:
        """Keep log files with ``pending`` messages, unless the disk is too full (diskSpaceCleanForciblyRatio)."""
        self.log_holds.add(pending)

    @property
    def indexes_tags(self) -> bool:
        """Whether the keys of a put message must include its tag."""
        return self.index is not None and self.index.tags

    @property
    def syncs_each_put(self) -> bool:
        """True under SYNC_FLUSH."""
        return self.write_path.durability.waits

    # -- the log

    @property
    def is_writable(self) -> bool:
        """False while puts are refused; ``flags.reason`` gives the reason."""
        return self.flags.writable

    def refusals(self) -> list[tuple[Flag, str]]:
        """Why reads or writes are refused: each flag with its text."""
        return self.flags.reasons()

    def refuses(self, flag: Flag) -> bool:
        """Whether ``flag`` is one of the reasons."""
        return self.flags.has(flag)

    @property
    def waits(self) -> "StoreWaits":
        """What puts wait for, now and since the start."""
        path = self.write_path
        return StoreWaits(
            path.sync.durations, path.lock.waits, path.lock.held_ms() / 1000, len(path.lock), path.lock.busy
        )

    @property
    def min_phy_offset(self) -> int:
        """Start of the log."""
        return self.commit_log.min_offset

    @property
    def max_phy_offset(self) -> int:
        """End of the log; with the transient store pool, the end of the committed part."""
        return self.write_path.durability.end_offset

    @property
    def appended_offset(self) -> int:
        """End of the log, with records that may not be read yet."""
        return self.commit_log.max_offset

    @property
    def readable_offset(self) -> int:
        """Records below this offset of the log may be read."""
        return self.write_path.durability.readable_offset

    @property
    def flushed_offset(self) -> int:
        """Everything below is on the device."""
        return self.write_path.sync.flushed_offset

    async def flush(self) -> bool:
        """Make everything that is in the log now durable. Returns False if the device refused."""
        path = self.write_path
        return await path.durability.commit_buffers() and await path.sync.flush()

    @property
    def dispatched_offset(self) -> int:
        """Everything below can be read through its queue."""
        return self.dispatcher.position

    @property
    def dispatch_behind_bytes(self) -> int:
        """Bytes of the log that may be read but are not yet dispatched."""
        return self._reput.behind()

    @property
    def message_arriving(self) -> list[MessageArriving]:
        """The listeners that are notified of each message that becomes readable."""
        return self.dispatcher.message_arriving

    def hear_awaited(self, awaited: Collection[tuple[str, int]], listener: MessageArriving) -> None:
        """Notify ``listener`` of messages that become readable in queues that are in ``awaited`` at that time."""
        self.dispatcher.awaited, self.dispatcher.on_awaited = awaited, listener

    def hear_waiting(self, listener: Callable[[str, int], None]) -> None:
        """On a slave: notify ``listener`` of the real topic and queue of each delayed, timed or half message."""
        self._reput.on_waiting = listener

    def add_topic_listener(self, topic: str, listener: MessageArriving) -> None:
        """Notify ``listener`` of messages of a topic that become readable."""
        self.dispatcher.arriving_in[topic] = listener

    @property
    def visible_offset(self) -> int:
        """Records that begin below this offset may be read by it.

        With slaves, what is dispatched: they acknowledge bytes, so what is replicated may end inside a record.
        """
        readable = self.write_path.durability.readable_offset
        return min(readable, self.dispatcher.position) if self.replication.holds_back else readable

    def look_message(self, offset: int) -> Any | None:
        """The record at a log offset: bytes, or a view valid until the next await; b"" for none, None if it is cold.

        A record that may not be read yet (SYNC_FLUSH, not durable) counts as none.
        """
        return self._finder.look(offset) if offset < self.visible_offset else b""

    def own_log(self) -> tuple[int, memoryview]:
        """Log offset and bytes of the part of the last log file that this process has put, as far as it may be read.

        All of it is in memory. The view is valid until the next await.
        """
        return self._finder.own_log(self.visible_offset)

    def look_own_message(self, offset: int) -> memoryview | None:
        """As ``look_message`` for a record that this process has put, without checks; None for all others."""
        return self._finder.look_own(offset) if offset < self.visible_offset else None

    async def look_message_cold(self, offset: int) -> Any:
        """As ``look_message``, waiting for the device."""
        return await self._finder.look_cold(offset) if offset < self.visible_offset else b""

    async def look_queued(self, offset: int) -> bytes:
        """As ``look_message_cold``, as a copy, and only for a record that its queue has at that place.

        A client may have sent a body with the bytes of a record, which may name any topic, and whose properties, which
        no CRC covers, may reach over the records of others behind it. No queue leads to such a record.
        """
        for _ in range(_LOOKS):  # a reply may come before its record is in its queue: SYNC_FLUSH, slaves
            if not self.dispatched_offset <= offset < self.visible_offset:
                break
            await self.clock.sleep(_LOOK_SECONDS)
        data = bytes(await self.look_message_cold(offset))
        if not data:
            return data
        head = decode_head(data)
        topic = str(data[head.topic_at : head.topic_end], "utf-8", "replace")
        units = await self.queue_units(topic, head.queue_id, head.queue_offset, 1)
        return data if units and units[0][:2] == (offset, len(data)) else b""

    async def same_record(self, offset: int, sha256: bytes) -> bool | None:
        """Whether the record at a log offset has this hash, readable or not; None if the log begins behind it."""
        found = await self.commit_log.sha256_of(offset)
        return None if found is None else found == sha256

    def why_missing(self, offset: int) -> str:
        """Why there is no message at a log offset, as a text for the client."""
        return f"no message starts at the commit log offset {offset}"

    def range_problem(self, topic: str, queue_id: int) -> str:  # noqa: ARG002 - for stores with a tier
        """Why the first message of a queue is not known at the moment, as a text for the client; empty if it is."""
        return ""

    async def read_log(self, start: int, visit: Visit) -> None:
        """Call ``visit`` with each record from a log offset on. Only before clients are served, see log_reader."""
        await read_log(self.commit_log, start, visit)

    async def earliest_message_time(self) -> int:
        """Store timestamp of the oldest record in the log; -1 if there is none."""
        return await self._finder.time_at(self.commit_log.min_offset)

    def runtime_info(self) -> dict[str, str]:
        """The store's part of a broker's runtime information."""
        info = self.stats.runtime_info(self.clock.wall_ms())
        info["commitLogMinOffset"] = str(self.min_phy_offset)
        info["commitLogMaxOffset"] = str(self.max_phy_offset)
        info["commitLogReadableOffset"] = str(self._dispatchable_offset())
        info["dispatchBehindBytes"] = str(self.dispatch_behind_bytes)
        info["pageCacheLockTimeMills"] = str(self.write_path.lock.held_ms())
        info["runningFlags"] = str(self.flags.bits)
        info["notWriteableReason"] = self.flags.reason
        info |= self.replication.runtime_info()
        return info
