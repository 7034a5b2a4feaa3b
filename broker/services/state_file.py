"""The small JSON files of ``config/``: parsed leniently, replaced atomically, written after the state has changed.

Source: RocketMQ's ConfigManager. A manager holds its table in memory and calls ``changed()``. One persister task writes
the file and combines changes: all that are made during a write go into the next one. A handler that promises a change
to a client waits for ``persisted()`` before it replies.

A file X is replaced in this order: write the new text to ``X.tmp`` and sync it, rename ``X`` to ``X.bak``, rename
``X.tmp`` to ``X``, sync the directory. If ``X`` is missing, empty or damaged, ``X.bak`` is read, as in RocketMQ. If
files exist and none of them can be read, or they are empty, the start is refused: only the absence of both files is an
empty state.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, read_whole, write_beside
from trimq.protocol import lenient_json
from trimq.protocol.body import DataVersion
from trimq.protocol.json_pieces import BATCH, item_pieces, object_pieces, table_pieces
from trimq.remoting.runtime.clock import Clock

E = TypeVar("E", bound=msgspec.Struct)

_log = structlog.get_logger("broker.state")

_PRETTY_LIMIT = 64 * 1024  # files up to this size are indented, for people who read them
_SLICE_SECONDS = 0.0005
_CHUNK = 128 * 1024
_RETRY_SECONDS = 1.0
_OTHERS_READ = 0o004


class StateFileError(Exception):
    """A state file cannot be read or written. The text names the file and the reason."""


def encode_pieces(state: Mapping[str, Any]) -> Iterator[bytes]:
    """The JSON text of a state. A large table comes in pieces, so that the caller can pause between them."""
    return object_pieces(*((name, _value_pieces(value)) for name, value in state.items()))


def _value_pieces(value: Any) -> Any:
    if isinstance(value, _Entries):
        return item_pieces(value.merged())
    return table_pieces(value) if isinstance(value, dict) else value


def replace_file(disk: Disk, path: str, *data: bytes) -> None:
    """Replace ``path`` by ``data`` (in pieces), and preserve the old content as ``.bak``.

    A file that others may not read stays so: secrets may be in it, as in a configuration. Blocks. Raises OSError; the
    old content is then still in ``path`` or in its ``.bak``.
    """
    directory = path.rpartition("/")[0]
    make_durable_directory(disk, directory)
    old = disk.stat(path)
    private = old is not None and not old.permissions & _OTHERS_READ
    # At every moment of this sequence ``path`` or its ``.bak`` is a complete file: the new text is synced before the
    # first rename, and the last directory sync makes both renames durable before the caller's reply.
    temporary = write_beside(disk, path, *data, private=private)
    if old is not None:
        disk.rename(path, path + ".bak")
    disk.rename(temporary, path)
    disk.sync_directory(directory)


class StateFile:
    """A file and its state in memory.

    ``pieces`` returns the text of the file in pieces; the writer lets other tasks run between them. ``interval``
    returns the seconds between two writes of changes that no caller waits for; without it a change is written
    immediately. Changes are numbered: the file is current if the last change on disk is the last one made.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        pieces: Callable[[], Iterable[bytes]],
        interval: Callable[[], float] | None = None,
    ) -> None:
        self.path = path
        self._disk = disk
        self._pieces = pieces
        self._interval = interval
        self._changes = 0
        self._written = 0
        self._attempts = 0
        self._failed = 0  # the last change that was in a write which failed
        self._wanted = False
        self._error: OSError | None = None
        self._wake = trio.Event()
        self._done = trio.Event()
        self._writing = trio.Lock()

    # reading

    async def load(self) -> dict[str, Any] | None:
        """Read the state from the file, else from its ``.bak``; None if neither exists.

        Raises StateFileError if one of them exists and none can be read.
        """
        problems: list[str] = []
        for path in (self.path, self.path + ".bak"):
            try:
                data = await self._disk.run(read_whole, self._disk, path)
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
                continue
            if data is None:
                continue
            # A power cut may leave a file of another writer with its length and no bytes.
            if not data.strip(b"\0 \t\r\n"):
                problems.append(f"{path}: empty ({len(data)} bytes)")
                continue
            try:
                state = lenient_json.loads(data)
            except (ValueError, RecursionError) as error:
                problems.append(f"{path}: {error}")
                continue
            if not isinstance(state, dict):
                problems.append(f"{path}: not a JSON object")
                continue
            if problems:
                _log.warning("state_file_from_backup", path=path, problems=problems)
            return state
        # A file that exists and cannot be read is no empty state: starting without it would lose what it holds.
        if problems:
            raise StateFileError(
                f"{'; '.join(problems)}: restore {self.path} from a backup, or delete it and its .bak to start without "
                "this state"
            )
        return None

    # writing

    def changed(self) -> None:
        """Record that the state has changed; the persister writes it."""
        self._changes += 1
        if self._interval is None:
            self._wake.set()

    @property
    def dirty(self) -> bool:
        """Whether the state has changes that are not in the file."""
        return self._written != self._changes

    async def persisted(self) -> None:
        """Return when every change made until now is on disk. Raises StateFileError if the write with them failed.

        If no write is running, the caller writes. All callers that arrive during a write wait for the next one, which
        has the changes of all of them.
        """
        target = self._changes
        while self._written < target:
            attempt = self._attempts
            if self._writing.locked():
                await self._done.wait()  # that write may have taken an older state: check again
            else:
                await self.persist()
            # Only a write that included this caller's change and failed after the call counts as its failure.
            if self._written < target <= self._failed and self._attempts > attempt and self._error is not None:
                raise StateFileError(f"{self.path} cannot be written: {self._error.strerror}") from self._error

    async def persist(self) -> None:
        """Write the file now if it is not current.

        A failure is raised by ``persisted()``, and the write is tried again later.
        """
        async with self._writing:
            if not self.dirty:
                return
            # Before the text is made: changes during that or during the write may be missing from the text, so they
            # must not count as written.
            target = self._changes
            try:
                data = await self._text()
                # Shielded: a cancelled caller must not leave a replacement half done while others wait for it.
                with trio.CancelScope(shield=True):
                    await self._disk.run(replace_file, self._disk, self.path, *data)
            except OSError as error:
                self._error, self._failed = error, target
                _log.error("state_file_not_written", path=self.path, reason=error.strerror)
            else:
                self._error = None
                self._written = target
            finally:
                self._attempts += 1
                self._done.set()
                self._done = trio.Event()

    async def _text(self) -> list[bytes]:
        """The current text in pieces of about ``_CHUNK`` bytes: joining all of them would block the loop."""
        chunks: list[bytes] = []
        parts: list[bytes] = []
        size = 0
        began = time.perf_counter()
        for piece in self._pieces():
            parts.append(piece)
            size += len(piece)
            if size >= _CHUNK:
                chunks.append(b"".join(parts))
                parts, size = [], 0
            if time.perf_counter() - began > _SLICE_SECONDS:
                await trio.lowlevel.checkpoint()
                began = time.perf_counter()
        chunks.append(b"".join(parts))
        if len(chunks) == 1 and size < _PRETTY_LIMIT:
            return [msgspec.json.format(chunks[0], indent=2)]
        return chunks

    async def run(self, sleep: Callable[[float], Any]) -> None:
        """The persister task. Never returns. ``sleep`` is the clock's."""
        while True:
            if self._error is not None:
                await sleep(_RETRY_SECONDS)
            elif self._interval is not None:
                await sleep(self._interval())
            elif not self.dirty:
                self._wake = trio.Event()
                await self._wake.wait()
            await self.persist()


class PersistentTable:
    """The common part of the managers of topics, groups and offsets: a table in memory that is written to a file.

    A subclass sets ``_file`` and ``_clock``.
    """

    _file: StateFile
    _clock: Clock

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write the file after changes, or at its interval, forever."""
        task_status.started()
        await self._file.run(self._clock.sleep)

    async def persisted(self) -> None:
        """Return when all changes made until now are on disk. Raises StateFileError."""
        await self._file.persisted()

    async def persist(self) -> None:
        """Write the file if it is not current (shutdown)."""
        await self._file.persist()


def unknown_fields(raw: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The fields that this program does not know. They are preserved: written back as they were read."""
    return {key: value for key, value in raw.items() if key not in known}


def wire_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The JSON names of a struct's fields."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


class _Entries(dict[str, Any]):
    """A snapshot of a table's entries. Their unknown fields are added while they are encoded.

    A small table gets them in the constructor, because it is encoded as a whole like any dictionary.
    """

    def __init__(self, entries: Mapping[str, Any], rest: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(entries)
        self._unknown = dict(rest)
        if len(self) <= BATCH and rest:
            self.update(list(self.merged()))
            self._unknown = {}

    def merged(self) -> Iterator[tuple[str, Any]]:
        """Each entry with its unknown fields."""
        unknown = self._unknown
        if not unknown:
            return iter(self.items())
        return (
            (name, msgspec.to_builtins(entry) | unknown[name] if name in unknown else entry)
            for name, entry in self.items()
        )


class EntryTable(Generic[E]):
    """The entries of a state file's table as structs, plus the fields that the structs do not have."""

    def __init__(self, kind: type[E]) -> None:
        self.entries: dict[str, E] = {}
        self._kind = kind
        self._known = wire_names(kind)
        self._rest: dict[str, dict[str, Any]] = {}

    def load(self, raw: Any, where: str, name_field: str) -> None:
        """Take the entries of a parsed table. An entry without ``name_field`` gets its key there.

        Raises StateFileError for an invalid entry: skipping it would lose it at the next write.
        """
        if not isinstance(raw, dict):
            raise StateFileError(f"{where}: not a table")
        for name, fields in raw.items():
            if not isinstance(fields, dict):
                raise StateFileError(f"{where}: {name}: not an object")
            given = {name_field: name} | {key: value for key, value in fields.items() if value is not None}
            if not isinstance(given.get("attributes", {}), dict):
                del given["attributes"]  # RocketMQ writes an empty text for no attributes
            try:
                self.entries[name] = msgspec.convert(given, self._kind, strict=False)
            except msgspec.ValidationError as error:
                raise StateFileError(f"{where}: {name}: {error}") from None
            if rest := unknown_fields(fields, self._known):
                self._rest[name] = rest

    def forget(self, name: str) -> None:
        """Drop the unknown fields of a deleted entry."""
        self._rest.pop(name, None)

    def encodable(self) -> dict[str, Any]:
        """A snapshot of the table for the encoder."""
        return _Entries(self.entries, self._rest)


def load_data_version(raw: Any, where: str) -> DataVersion:
    """The ``dataVersion`` of a state file; a new one if it has none."""
    try:
        return msgspec.convert(raw or {}, DataVersion, strict=False)
    except msgspec.ValidationError as error:
        raise StateFileError(f"{where}: dataVersion: {error}") from None
