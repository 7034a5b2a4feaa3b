"""Opens the local index files of the tier at a start. Source: RocketMQ's IndexStoreService.recover."""

from typing import Final, NamedTuple

import structlog

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, read_whole
from trimq.broker.store.tiered.container.index_marks import MARKS_NAME, Marks, decode_marks
from trimq.broker.store.tiered.container.index_store_file import IndexStatus, IndexStoreFile, TieredIndexShape
from trimq.protocol.tiered_index_layout import HEADER, HEADER_SIZE

_log = structlog.get_logger(__name__)

DIRECTORY: Final = "tiered_index_file"
COMPACTING: Final = "compacting"
_OLD_NAMES: Final = ("0000", "1111")
"""Names that RocketMQ gave to the two local files before 5.2."""


class LocalIndex(NamedTuple):
    """The open files, the oldest first, and what is known to be durable of them; None: not known."""

    files: list[IndexStoreFile]
    marks: Marks | None


def recover_local(disk: Disk, directory: str, shape: TieredIndexShape) -> LocalIndex:
    """Open the files of a directory. Blocks. A file that cannot be read is left out. Raises OSError."""
    make_durable_directory(disk, directory)
    for name in disk.list(f"{directory}/{COMPACTING}"):
        disk.delete(f"{directory}/{COMPACTING}/{name}")
    for name in _OLD_NAMES:
        _rename_old(disk, directory, name)
    marks = decode_marks(read_whole(disk, f"{directory}/{MARKS_NAME}"))
    files: list[IndexStoreFile] = []
    for name in disk.list(directory):
        info = disk.stat(f"{directory}/{name}")
        if not name.isascii() or not name.isdigit() or str(int(name)) != name or info is None or info.is_directory:
            continue
        try:
            file = _open(disk, f"{directory}/{name}", info.size, shape, marks)
        except OSError as error:
            _log.error("tiered_index_file_not_opened", path=f"{directory}/{name}", error=str(error))
        else:
            if file is not None:
                files.append(file)
    files.sort(key=lambda file: file.stamp)
    for file in files[:-1]:
        file.status = IndexStatus.SEALED
    return LocalIndex(files, marks)


def _open(disk: Disk, path: str, size: int, shape: TieredIndexShape, marks: Marks | None) -> IndexStoreFile | None:
    mark = None if marks is None else marks.files.get(int(path.rpartition("/")[2]))
    actual = shape if mark is None else TieredIndexShape(mark.slots, mark.items)
    if size != actual.file_size:
        # Of another configuration, or a file that was only begun: its number of slots is not written in it.
        _log.warning("tiered_index_file_wrong_size", path=path, size=size, expected=actual.file_size)
        disk.rename(path, f"{path}.wrong_size")
        return None
    file = IndexStoreFile.open(disk, path, actual, durable=0 if mark is None else mark.durable, exact=mark is not None)
    if actual != shape:
        file.status = IndexStatus.SEALED
    return file


def _rename_old(disk: Disk, directory: str, name: str) -> None:
    path = f"{directory}/{name}"
    info = disk.stat(path)
    if info is None or info.is_directory:
        return
    fd = disk.open(path, writable=False)
    try:
        head = disk.pread(fd, HEADER_SIZE, 0)
    finally:
        disk.close(fd)
    stamp = HEADER.unpack(head)[1] if len(head) == HEADER_SIZE else 0
    if stamp > 0:
        disk.rename(path, f"{directory}/{stamp}")
    else:
        disk.delete(path)
    disk.sync_directory(directory)
