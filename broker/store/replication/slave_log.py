"""SlaveLog: what a slave does with the bytes of its master's log. It appends whole records that it has checked.

Source: RocketMQ's DefaultHAClient.dispatchReadRequest, which appends whatever comes.
"""

import time
from typing import Any, Final

import trio

from trimq.broker.store.disk.mapped_file import BLANK_SPACE
from trimq.broker.store.durability.write_path import WritePath
from trimq.broker.store.log.log_rows import MOST, checked_size
from trimq.broker.store.log.log_scan import Blank, NoRecordError, RecordReader
from trimq.protocol import record

_SLICE: Final = 0.001
_LONGEST: Final = 64 << 20
"""The longest record or BLANK that is believed: its bytes wait in memory until it is complete."""


class BadTransferError(Exception):
    """The master sends what cannot follow in this log; the text says why."""


class SlaveLog:
    """Takes the bytes of a master's log, in order, from ``end_offset`` on."""

    def __init__(self, path: WritePath) -> None:
        self._path = path
        self._log = path.log
        self._reader = RecordReader(path.log.files.size)
        self._rest = bytearray()

    @property
    def end_offset(self) -> int:
        """The end of the log, and of what was checked."""
        return self._log.max_offset

    @property
    def begin_offset(self) -> int:
        """The start of the log."""
        return self._log.min_offset

    @property
    def file_size(self) -> int:
        """The size of each file of the log."""
        return self._log.files.size

    @property
    def next_offset(self) -> int:
        """Where the next bytes belong: behind those of an incomplete record."""
        return self._log.max_offset + len(self._rest)

    def forget_rest(self) -> None:
        """Forget the bytes of an incomplete record: they will be sent again."""
        self._rest = bytearray()

    async def take(self, data: Any) -> bool:
        """Append the records that ``data`` completes. Returns whether there was one. Raises BadTransferError."""
        self._rest += data
        appended = False
        while True:
            size, timestamp = self._whole()
            if not size:
                return appended
            chunk = bytes(self._rest[:size])
            await self._path.append_data(chunk, timestamp)
            del self._rest[:size]
            appended = True
            if not self._rest:  # the usual case; the caller waits for the next bytes
                return True
            await trio.lowlevel.checkpoint()

    def _whole(self) -> tuple[int, int]:
        """Check the records at the start; returns their size, about a millisecond's worth, and the last store time.

        They end with the file at the latest.
        """
        offset, file_size = self._log.max_offset, self._log.files.size
        rest, timestamp = memoryview(self._rest), self._log.last_store_timestamp
        until = time.perf_counter() + _SLICE
        at = 0
        try:
            at, stored = checked_size(rest[:MOST], offset, file_size - offset % file_size)
            if at:
                return at, stored
            while len(rest) - at >= record.BLANK_SIZE:
                left = file_size - (offset + at) % file_size
                size, magic = record.SIZE_MAGIC.unpack_from(rest, at)
                self._check_size(offset + at, size, magic, left)
                if len(rest) - at < size:
                    break
                found = self._reader.read(rest, at, offset + at)
                at += size
                if isinstance(found, Blank):
                    break  # what follows belongs to the next file
                timestamp = found.store_timestamp
                if time.perf_counter() >= until:
                    break
        except NoRecordError as error:
            why = str(error) or "zeros"
            raise BadTransferError(f"no valid record at {offset + at}: {why}") from error
        finally:
            rest.release()
        return at, timestamp

    def _check_size(self, offset: int, size: int, magic: int, left: int) -> None:
        if size > _LONGEST:
            raise BadTransferError(f"no record at {offset}: its size would be {size}")
        if magic == record.MAGIC_BLANK:
            if size != left:
                raise BadTransferError(
                    f"the master's file ends {size} bytes behind {offset}, this store's {left} bytes behind it: "
                    "mappedFileSizeCommitLog must be the same"
                )
        elif not record.OVERHEAD_V1 <= size <= left - BLANK_SPACE:
            raise BadTransferError(
                f"no record at {offset}: its size would be {size}, {left} bytes are left in the file"
            )
