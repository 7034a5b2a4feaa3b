"""A store directory that no broker has open: locks it, checks that it is a store, opens its files for reading."""

import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from trimq.broker.config import MessageStoreConfig, load_broker
from trimq.broker.store.disk.disk import Mapping
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.disk.store_lock import ABORT_FILE, LOCK_FILE, StoreInUseError, StoreLock
from trimq.broker.store.index.index_file import IndexFile, IndexShape
from trimq.broker.store.queue.consume_queue import QueueShape
from trimq.broker.store.queue.consume_queue_store import DIRECTORY, ConsumeQueueStore
from trimq.broker.store.queue.queue_sizes import QueueFileError, file_lengths, other_size, queue_directories
from trimq.broker.store.queue.queue_snapshot import read_file_size
from trimq.protocol.file_names import is_index_name, offset_name, parse_offset_name
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.remoting.config.properties import ConfigError

_ROCKSDB_FILE: Final = "CURRENT"


class NotUsableError(Exception):
    """The directory cannot be used. The text gives the reason and a remedy."""


class _ReadOnlyMapping:
    def __init__(self, fd: int, size: int) -> None:
        self.buffer = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self.view = memoryview(self.buffer)

    def close(self) -> None:
        self.view.release()
        self.buffer.close()


class ReadOnlyDisk(RealDisk):
    """A Disk that cannot change a file."""

    def open(self, path: str, *, writable: bool = True) -> int:  # noqa: ARG002 - always opened for reading
        """See Disk; the descriptor is read-only."""
        return super().open(path, writable=False)

    def map(self, fd: int, size: int) -> Mapping:
        """See Disk; the mapping is read-only."""
        return _ReadOnlyMapping(fd, size)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:  # noqa: ARG002 - as Disk has it
        """Refused."""
        self._refuse()

    def create(self, path: str, size: int, *, private: bool = False) -> int:  # noqa: ARG002 - as Disk has it
        """Refused."""
        self._refuse()

    def truncate(self, fd: int, size: int) -> None:  # noqa: ARG002 - as Disk has it
        """Refused."""
        self._refuse()

    def delete(self, path: str) -> None:  # noqa: ARG002 - as Disk has it
        """Refused."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise PermissionError("this store is open for reading only")


class OfflineStore:
    """The files of a store directory. ``notes`` are observations that are not faults."""

    def __init__(self, config: MessageStoreConfig) -> None:
        self.config = config
        self.root = str(config.root)
        self.disk = ReadOnlyDisk()
        self.notes: list[str] = []
        self.stopped_in_order = self.disk.stat(f"{self.root}/{ABORT_FILE}") is None
        self.files: list[MappedFile] = []
        self.index_files: list[IndexFile] = []

    @property
    def log_start(self) -> int:
        """The log offset of the first file."""
        return self.files[0].start if self.files else 0

    def open_log(self) -> list[str]:
        """Map the log files up to the first invalid one. Returns the fault that ends the log, if there is one."""
        directory = str(self.config.commit_log_path)
        size = self.config.mapped_file_size_commit_log
        faults = []
        found = sorted((name for name in self.disk.list(directory) if parse_offset_name(name) is not None), key=int)
        for name in found:
            path = f"{directory}/{name}"
            info = self.disk.stat(path)
            length = info.size if info is not None else 0
            if length == 0 and name == found[-1]:
                self.notes.append(f"{path} is empty: the next start deletes it")
            elif length != size:
                faults.append(f"{path} has {length} bytes, the others have {size}")
            elif self.files and int(name) != self.files[-1].end:
                faults.append(f"between {self.files[-1].path} and {path} a file is missing")
            else:
                self.files.append(MappedFile.open(self.disk, path, int(name), size))
                continue
            if faults:
                break
        return faults

    def queue_directory(self, topic: str, queue_id: int) -> str:
        """The directory of a queue's files."""
        return f"{self.root}/{DIRECTORY}/{topic}/{queue_id}"

    def queues(self) -> dict[tuple[str, int], list[tuple[int, str]]]:
        """The files of each queue: the byte offset of the first unit in the file, and its path."""
        return {
            (topic, queue_id): [
                (start, f"{directory}/{offset_name(start)}") for start in file_lengths(self.disk, directory)
            ]
            for topic, queue_id, directory in queue_directories(self.disk, f"{self.root}/{DIRECTORY}")
        }

    def open_index(self) -> list[str]:
        """Map the index files. Returns the faults of those that are invalid."""
        shape = IndexShape(self.config.max_hash_slot_num, self.config.max_index_num)
        faults = []
        directory = f"{self.root}/index"
        for name in sorted(filter(is_index_name, self.disk.list(directory)), key=int):
            path = f"{directory}/{name}"
            info = self.disk.stat(path)
            if info is None or info.size != shape.file_size:
                size = info.size if info is not None else 0
                faults.append(
                    f"{path} has {size} bytes; maxHashSlotNum={shape.slots} and maxIndexNum={shape.entries} make "
                    f"{shape.file_size}: pass the broker's configuration with -c if it has other values"
                )
                continue
            file = IndexFile.open(self.disk, path, shape)
            if file.is_plausible:
                self.index_files.append(file)
            else:
                faults.append(f"the header of {path} is invalid: {file.count} entries of {shape.entries}")
                file.close()
        return faults

    def close(self) -> None:
        """Close all files."""
        for log_file in self.files:
            log_file.close()
        for index_file in self.index_files:
            index_file.close()


def find_config(root: Path, config_file: str | None) -> MessageStoreConfig:
    """The store's section of a configuration, with the file sizes that most files have. Raises NotUsableError."""
    if not root.is_dir():
        raise NotUsableError(f"there is no directory {root}")
    try:
        configuration = load_broker(config_file, {"storePathRootDir": (str(root), "STORE")})
    except ConfigError as error:
        raise NotUsableError(f"the configuration cannot be used: {error}") from error
    config = configuration.section(MessageStoreConfig)
    if not (config.commit_log_path.is_dir() or (root / "consumequeue").is_dir()):
        raise NotUsableError(f"{root} is not a store: it has neither commitlog nor consumequeue")
    if (root / "consumequeue" / _ROCKSDB_FILE).exists():
        raise NotUsableError(f"the queues of {root} are stored in RocksDB (storeType=defaultRocksDB): not supported")
    log_size = _usual_size(config.commit_log_path.glob("[0-9]*"))
    if log_size:
        config = replace(config, mapped_file_size_commit_log=log_size)
    given = configuration.source("mappedFileSizeConsumeQueue") != "default"
    return replace(config, mapped_file_size_consume_queue=_queue_file_size(root, config, given=given))


def _queue_file_size(root: Path, config: MessageStoreConfig, *, given: bool) -> int:
    """The size that a start would use: the configured one if it is ``given``, else the one that the store records."""
    disk = ReadOnlyDisk()
    shape = QueueShape(config.consume_queue_file_size // UNIT_SIZE, config.mapped_file_size_commit_log)
    queues = ConsumeQueueStore(disk, str(root), shape)
    known = read_file_size(queues)
    if given:
        try:
            queues.check_size(known)
        except QueueFileError as error:
            raise NotUsableError(f"a broker with this configuration would not start: {error}") from error
        return config.mapped_file_size_consume_queue
    lengths = [file.stat().st_size for file in (root / DIRECTORY).glob("*/*/[0-9]*")]
    if known is not None and (known in lengths or len(lengths) <= 1):
        return known
    other = other_size(disk, queues.directory, -1, None)
    return other.size if other is not None else config.mapped_file_size_consume_queue


def _usual_size(files: Iterator[Path]) -> int:
    sizes = Counter(size for size in (file.stat().st_size for file in files) if size)
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock the store, so that no broker can open it during the block. Raises NotUsableError if one has it open."""
    if not root.is_dir():
        raise NotUsableError(f"there is no directory {root}")
    try:
        lock = StoreLock.acquire(RealDisk(), str(root.absolute()))
    except StoreInUseError as error:
        raise NotUsableError(str(error)) from error
    except OSError as error:
        raise NotUsableError(f"the lock {root / LOCK_FILE} cannot be taken: {error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def opened(root: Path, config_file: str | None) -> Iterator[OfflineStore]:
    """The store, locked during the block. None of its files is open yet."""
    root = root.absolute()
    with locked(root):
        store = OfflineStore(find_config(root, config_file))
        try:
            yield store
        finally:
            store.close()
