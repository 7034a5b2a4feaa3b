"""The store's section of the broker's configuration (RocketMQ's MessageStoreConfig)."""

import enum
import re
from dataclasses import dataclass
from pathlib import Path

from trimq.remoting.config.options import option

KIB = 1024
MIB = 1024 * KIB


class FlushDiskType(enum.StrEnum):
    """When a send is acknowledged: before (ASYNC_FLUSH) or after (SYNC_FLUSH) the message is on disk."""

    ASYNC_FLUSH = "ASYNC_FLUSH"
    SYNC_FLUSH = "SYNC_FLUSH"


DEFAULT_DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_DELAY_UNITS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Parse `1s 5s` into (0, 1000, 5000): milliseconds by level. Level 0 is no delay. Raises ValueError."""
    levels = [0]
    for word in text.split():
        if not re.fullmatch(r"\d+[smhd]", word):
            raise ValueError(f"{word!r} is not a number followed by s, m, h or d")
        levels.append(int(word[:-1]) * _DELAY_UNITS[word[-1]])
    if len(levels) == 1:
        raise ValueError("at least one level is required")
    return tuple(levels)


def _delay_levels_problem(text: str) -> str:
    try:
        parse_delay_levels(text)
    except ValueError:
        return "numbers with s, m, h or d, separated by blanks"
    return ""


def _hours_problem(text: str) -> str:
    parts = text.split(";")
    good = all(part.strip().isdigit() and int(part) < 24 for part in parts if part.strip())
    return "" if good and text.strip(" ;") else "hours from 00 to 23, separated by ;"


@dataclass(frozen=True)
class MessageStoreConfig:
    """Where and how messages are stored (RocketMQ's MessageStoreConfig)."""

    store_path_root_dir: str = option(
        lambda: str(Path("~/store").expanduser()),
        "Directory of all files that the broker stores.",
        shown="store in the home directory",
    )
    store_path_commit_log: str | None = option(
        None, "Directory of the commit log.", unset="commitlog in storePathRootDir"
    )
    mapped_file_size_commit_log: int = option(
        1024 * MIB,
        "Size of a commit log file. An existing store has to be opened with the size it was created with.",
        unit="bytes",
        minimum=4 * KIB,
        maximum=2**31 - 1,
    )
    mapped_file_size_consume_queue: int = option(
        300000 * 20,
        "Size of a consume queue file, 20 bytes per message; rounded up to a multiple of 20.",
        unit="bytes",
        minimum=20,
        maximum=2**31 - 20,
    )
    flush_disk_type: FlushDiskType = option(
        FlushDiskType.ASYNC_FLUSH,
        "When a send is acknowledged: once the message is in memory (ASYNC_FLUSH) or on disk (SYNC_FLUSH).",
    )
    sync_flush_timeout: int = option(
        5000, "SYNC_FLUSH: a send that waits longer is answered FLUSH_DISK_TIMEOUT.", unit="ms", minimum=1
    )
    flush_interval_commit_log: int = option(
        500, "ASYNC_FLUSH: time between two flushes of the commit log.", unit="ms", minimum=1
    )
    flush_commit_log_timed: bool = option(
        True, "Flush only at that interval; otherwise a message that arrives starts a flush too."
    )
    flush_commit_log_least_pages: int = option(
        4, "Skip a flush while fewer than this many pages of 4 KiB need it.", minimum=0
    )
    flush_commit_log_thorough_interval: int = option(
        10000, "After this time flush regardless of the number of pages.", unit="ms", minimum=1
    )
    transient_store_pool_enable: bool = option(
        False,
        "ASYNC_FLUSH: write messages to private memory of the broker first. A send then never waits for the page "
        "cache, but a crash of the broker loses acknowledged messages that are not yet committed to the file. No "
        "effect with SYNC_FLUSH.",
    )
    transient_store_pool_size: int = option(
        5,
        "Most commit log files that have such memory at the same time. It is allocated as it is used, and locked as "
        "far as the limit of locked memory (ulimit -l) allows.",
        minimum=1,
        maximum=1000,
    )
    fast_fail_if_no_buffer_in_store_pool: bool = option(
        False, "Refuse messages while all buffers are in use; otherwise write the next file through the page cache."
    )
    commit_interval_commit_log: int = option(
        200, "Transient store pool: time between two commits of its memory to the files.", unit="ms", minimum=1
    )
    commit_commit_log_least_pages: int = option(
        4, "Skip a commit while fewer than this many pages of 4 KiB need it.", minimum=0
    )
    commit_commit_log_thorough_interval: int = option(
        200, "After this time commit regardless of the number of pages.", unit="ms", minimum=1
    )
    warm_maped_file_enable: bool = option(
        False,
        "Prepare a whole commit log file for writing when it is created, not only the part that is needed next.",
    )
    flush_interval_consume_queue: int = option(
        1000, "Time between two flushes of the consume queues.", unit="ms", minimum=1
    )
    flush_consume_queue_least_pages: int = option(
        2, "Skip a consume queue while fewer than this many of its pages of 4 KiB need a flush.", minimum=0
    )
    flush_consume_queue_thorough_interval: int = option(
        60000, "After this time flush all consume queues.", unit="ms", minimum=1
    )
    max_message_size: int = option(
        4 * MIB, "Largest message body.", unit="bytes", minimum=1, maximum=2**31 - 1, dynamic=True
    )
    os_page_cache_busy_time_out_mills: int = option(
        1000, "A send that waits longer than this for its turn is answered SYSTEM_BUSY.", unit="ms", minimum=1
    )
    check_crc_on_recover: bool = option(
        True, "Verify the checksum of each record that a recovery reads.", key="checkCRCOnRecover"
    )
    delete_when: str = option(
        "04",
        "Hours of the day (local time) at which expired files are deleted, separated by ;.",
        check=_hours_problem,
        dynamic=True,
    )
    file_reserved_time: int = option(
        72, "How long messages are retained.", unit="hours", minimum=1, maximum=1_000_000, dynamic=True
    )
    disk_max_used_space_ratio: int = option(
        75,
        "Disk usage above which expired files are deleted at any hour.",
        unit="percent",
        minimum=10,
        maximum=95,
        dynamic=True,
    )
    disk_space_clean_forcibly_ratio: int = option(
        85,
        "Disk usage above which the oldest files are deleted even if they are not expired.",
        unit="percent",
        minimum=30,
        maximum=85,
        dynamic=True,
    )
    disk_space_warning_level_ratio: int = option(
        90, "Disk usage above which sends are refused.", unit="percent", minimum=35, maximum=90, dynamic=True
    )
    clean_file_forcibly_enable: bool = option(
        True, "Allow the deletion of files that are not expired when the disk gets full.", dynamic=True
    )
    clean_resource_interval: int = option(10000, "Time between two searches for expired files.", unit="ms", minimum=100)
    delete_commit_log_files_interval: int = option(
        100, "Pause between two deletions of commit log files.", unit="ms", minimum=0
    )
    delete_consume_queue_files_interval: int = option(
        100, "Pause between two deletions of consume queue files.", unit="ms", minimum=0
    )
    delete_file_batch_max: int = option(10, "Most files deleted in one pass.", minimum=1, dynamic=True)
    destroy_maped_file_interval_forcibly: int = option(
        120000,
        "Connections that still read a deleted file are closed after this time.",
        unit="ms",
        minimum=0,
    )
    max_transfer_bytes_on_message_in_memory: int = option(
        256 * KIB, "Most bytes that a pull returns of messages in memory.", unit="bytes", minimum=1, dynamic=True
    )
    max_transfer_count_on_message_in_memory: int = option(
        32, "Most messages that a pull returns of those in memory.", minimum=1, dynamic=True
    )
    max_transfer_bytes_on_message_in_disk: int = option(
        64 * KIB,
        "Most bytes that a pull returns of messages that have to be read from disk.",
        unit="bytes",
        minimum=1,
        dynamic=True,
    )
    max_transfer_count_on_message_in_disk: int = option(
        8, "Most messages that a pull returns of those that have to be read from disk.", minimum=1, dynamic=True
    )
    access_message_in_memory_max_ratio: int = option(
        40,
        "Share of the memory that recent messages are assumed to occupy. For older ones the kernel is asked.",
        unit="percent",
        minimum=0,
        maximum=100,
        dynamic=True,
    )
    max_filter_message_size: int = option(
        16000, "Most bytes of a consume queue that one pull searches.", unit="bytes", minimum=20, dynamic=True
    )
    message_index_enable: bool = option(True, "Maintain the index of messages by key.")
    index_tag_enable: bool = option(
        True, "Index each message's tag too, as RocketMQ 5.5 does. Queries with the index type T need it."
    )
    max_hash_slot_num: int = option(5_000_000, "Hash slots of an index file.", minimum=1, maximum=2**28)
    max_index_num: int = option(
        20_000_000, "Entries of an index file; the first is not used.", minimum=2, maximum=2**26
    )
    max_msgs_num_batch: int = option(64, "Most messages that a query returns.", minimum=1, dynamic=True)
    default_query_max_num: int = option(
        32, "Most messages that a query by unique key returns.", minimum=1, dynamic=True
    )
    message_delay_level: str = option(
        DEFAULT_DELAY_LEVELS, "Delays of the levels 1, 2, 3 and so on; units s, m, h, d.", check=_delay_levels_problem
    )
    flush_delay_offset_interval: int = option(
        10000, "Time between two writes of delayOffset.json.", unit="ms", minimum=100
    )
    timer_wheel_enable: bool = option(
        True,
        "Accept messages with a precise delivery time (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS), and deliver "
        "them. Those that wait are kept meanwhile.",
    )
    timer_precision_ms: int = option(
        1000,
        "Timed messages are delivered at the next multiple of this time: 100, 200, 500 or 1000; a value between them "
        "is rounded down.",
        unit="ms",
        minimum=1,
    )
    timer_roll_window_slot: int = option(
        172_800,
        "A message that is due after this many times timerPrecisionMs is stored again in between. Values below 2 or "
        "above 604740 mean 604740.",
    )
    timer_max_delay_sec: int = option(
        259_200, "Longest delay of a timed message.", unit="s", minimum=0, maximum=2**31 - 1, dynamic=True
    )
    timer_flush_interval_ms: int = option(
        1000, "Time between two checkpoints of the timer.", unit="ms", minimum=1, dynamic=True
    )
    timer_congest_num_each_slot: int = option(
        2**31 - 1,
        "When more messages than this are due in the same timerPrecisionMs, some further ones are refused; with twice "
        "as many all of them.",
        minimum=1,
        maximum=2**31 - 1,
        dynamic=True,
    )
    timer_stop_enqueue: bool = option(
        False, "Leave timed messages in their queue: none enters the timer until this is false again.", dynamic=True
    )
    timer_stop_dequeue: bool = option(False, "Deliver no timed message until this is false again.", dynamic=True)
    timer_skip_unknown_error: bool = option(
        False, "Skip a timed message whose delivery fails for an unknown reason, instead of trying again.", dynamic=True
    )
    append_topic_for_timer_delete_key: bool = option(
        False,
        "A recall names the topic of its message too. Change it only while no recall waits in the timer.",
    )
    mapped_file_size_timer_log: int = option(
        100 * MIB,
        "Size of a file of the timer's log. An existing store has to be opened with the size it was created with.",
        unit="bytes",
        minimum=4 * KIB,
        maximum=2**31 - 1,
    )
    commit_log_reserve_step: int = option(
        64 * MIB,
        "Disk space is reserved ahead of the write position in steps of this size.",
        unit="bytes",
        minimum=4 * KIB,
        ours=True,
    )
    consume_queue_max_open_files: int = option(
        256, "Most consume queue files that are open at the same time.", minimum=4, ours=True
    )

    def problem(self) -> tuple[str, str] | None:
        """A key whose value conflicts with other keys, and the expected value; None if there is no conflict."""
        if self.disk_space_clean_forcibly_ratio > self.disk_space_warning_level_ratio:
            return (
                "diskSpaceCleanForciblyRatio",
                f"at most diskSpaceWarningLevelRatio ({self.disk_space_warning_level_ratio})",
            )
        if self.fast_fail_if_no_buffer_in_store_pool and self.transient_store_pool_size < 2:
            return (
                "transientStorePoolSize",
                "at least 2 with fastFailIfNoBufferInStorePool: two files are open at the same time",
            )
        return None

    @property
    def commit_thorough_ms(self) -> int:
        """Transient store pool: the longest time in ms until a message is committed to its file."""
        return self.commit_interval_commit_log + self.commit_commit_log_thorough_interval

    @property
    def root(self) -> Path:
        """The store's directory as an absolute path."""
        return Path(self.store_path_root_dir).expanduser().absolute()

    @property
    def commit_log_path(self) -> Path:
        """Directory of the commit log files."""
        if self.store_path_commit_log:
            return Path(self.store_path_commit_log).expanduser().absolute()
        return self.root / "commitlog"

    @property
    def config_path(self) -> Path:
        """Directory of the small JSON files (topics, groups, offsets)."""
        return self.root / "config"

    @property
    def consume_queue_file_size(self) -> int:
        """mappedFileSizeConsumeQueue, rounded up to whole units."""
        return -(-self.mapped_file_size_consume_queue // 20) * 20

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delay of each level in ms; [0] is no delay."""
        return parse_delay_levels(self.message_delay_level)
