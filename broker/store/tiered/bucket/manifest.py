"""The manifest of a broker in a bucket: which objects belong to its history, and who may change it.

The root names immutable pages and is replaced by compare-and-swap (If-Match). A broker that becomes the owner gives it
a greater epoch and a random name; from then on each replacement of another broker fails, and that one is fenced.
"""

import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import trio

from trimq.broker.store.tiered.bucket import manifest_reads as reads
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest_load import Loaded, load
from trimq.broker.store.tiered.bucket.manifest_pages import Pages, compact
from trimq.broker.store.tiered.bucket.object_store import ChangedError
from trimq.protocol.bucket_manifest import (
    MOST_PAGE_BYTES,
    Entry,
    PageRef,
    Root,
    StoredObject,
    encode_indexes,
    encode_root,
    split_pages,
)
from trimq.protocol.bucket_names import MOST_EPOCH, ROOT, ObjectName, indexes_name, page_name, state_name
from trimq.protocol.bucket_object import BucketFormatError, Directory

_CLAIMS: Final = 8
"""How often a claim begins again because another broker was faster, and how often the root is replaced at once."""
_NAMES: Final = 64


class FencedError(Exception):
    """Another broker owns the bucket, or a greater epoch."""


def random_owner() -> str:
    """A name for an owner that no other process has."""
    return secrets.token_hex(8)


class Manifest:
    """See above. It belongs to the event loop. ``load``, ``claim`` and ``save`` wait for each other.

    Objects may be added and changed while a save is under way; they belong to the next one then. An OSError leaves all
    as it was: what was to be saved is still unsaved.
    """

    def __init__(
        self, bucket: Bucket, cluster: str, broker: str, *, new_owner: Callable[[], str] = random_owner
    ) -> None:
        self._bucket = bucket
        self._cluster = cluster
        self._broker = broker
        self._new_owner = new_owner
        self.root: Root | None = None
        """The root in the bucket, as far as known."""
        self.end = 0
        """The log offset behind the last known object."""
        self.unsaved = 0
        """Objects added since the last save."""
        self.unsaved_changes = 0
        """Joins, expiries and deletions since then."""
        self.fenced = ""
        """Why this broker may not write any more; empty if it may."""
        self.lost_from: int | None = None
        """From this log offset on, what this broker has uploaded is garbage: it was fenced before a root named it."""
        self.indexes: tuple[str, ...] = ()
        """The index files that the root names, by a list in an object of its own."""
        self.lost_list = ""
        """Why this list could not be read; the root names it still. ``indexes`` are what the bucket has then."""
        self._owner = ""
        self._version: str | None = None
        self._sequence = 0
        self._pages = Pages()
        self._uploads: list[reads.Upload] = []
        """Upload objects of the owner before, as they were read, that the root does not cover."""
        self._state: bytes | None = None
        """The newest state, if the root does not name it yet: that of an object, or of a save that has failed."""
        self._indexes: tuple[str, ...] | None = None
        """The index files that the next root shall name, if they are others: they may be those of a failed save."""
        self._predecessor: int | None = None
        """The epoch whose late objects a claim has yet to look for."""
        self._claimed = "", 0
        """The owner of the last try to claim the bucket, whose reply may be lost, and the epoch before it."""
        self._lock = trio.Lock()
        self._written: set[str] = set()
        """Pages, states and lists that may be in the bucket, and that the next root may not name."""
        self._garbage: list[str] = []

    @property
    def entries(self) -> list[Entry]:
        """All objects in log order: begin, generation, number."""
        return self._pages.entries

    @property
    def chain(self) -> list[Entry]:
        """The upload objects that the root in the bucket does not cover."""
        covered = self.root.end if self.root is not None else 0
        at = bisect_left(self.entries, covered, key=lambda entry: entry.object.begin)
        return self.entries[at:]

    @property
    def is_owner(self) -> bool:
        """Whether this broker has claimed the bucket and is not fenced, as far as it knows."""
        return bool(self._owner) and not self.fenced

    async def load(self) -> None:
        """Read what the bucket has. Nothing is written. Raises OSError and BucketFormatError."""
        if self.is_owner:
            raise RuntimeError("the owner of a bucket does not load its manifest")
        async with self._lock:
            if not self.is_owner:  # a claim may have come first: it has read all
                await self._load()

    async def _load(self) -> None:
        known = Loaded(self.root, self._version, list(self._pages), self._uploads, self.indexes, self.lost_list)
        found = await load(self._bucket, self._cluster, self._broker, known)
        self.root, self._version = found.root, found.version
        self.end = found.root.end if found.root is not None else 0
        self._pages = Pages(found.pages)
        self.indexes, self.lost_list = found.indexes, found.lost_list
        self._indexes = self.indexes if self.lost_list else None  # the next root names a new list
        self.unsaved = self.unsaved_changes = 0
        self._uploads = found.chain
        self._append([upload.entry for upload in found.chain])

    def _append(self, entries: Sequence[Entry]) -> None:
        self._pages.append(entries)
        self.unsaved += len(entries)
        if entries:
            self.end = entries[-1].object.end

    async def claim(self, least_epoch: int = 0) -> None:
        """Become the owner, with an epoch that no one had and that is not less than ``least_epoch``.

        Raises FencedError if this broker was fenced already, or if others claim the bucket all the time; OSError; and
        BucketFormatError.
        """
        async with self._lock:
            if self.fenced:
                raise FencedError(self.fenced)
            if self._predecessor is None or not self.is_owner or self._epoch < least_epoch:
                await self._claim(least_epoch)
            # The owner before did not know yet, and may have uploaded more since the objects were listed.
            if self._predecessor:
                late = await reads.read_chain(self._bucket, self._predecessor, self.end)
                self._uploads.extend(late)
                self._append([upload.entry for upload in late])
                if self._uploads:
                    await self._find_state()
                    await self._save(None, None)
            self._predecessor = None

    async def _claim(self, least_epoch: int) -> None:
        self._owner = ""
        for _ in range(_CLAIMS):
            await self._load()
            before = self.root
            used = await reads.greatest_epoch(self._bucket, 0 if before is None else before.end)
            epoch = max(1 if before is None else before.epoch + 1, used + 1, least_epoch)
            if epoch > MOST_EPOCH:
                raise BucketFormatError(f"epoch {epoch} is greater than {MOST_EPOCH}, the greatest that names have")
            owner = self._new_owner()
            self._sequence = 0 if before is None else before.sequence
            predecessor = 0 if before is None else before.epoch
            if before is not None and before.owner == self._claimed[0]:
                predecessor = self._claimed[1]
            self._claimed = owner, predecessor
            try:
                await self._find_state()
                await self._write(epoch, owner, None, None)
            except ChangedError:
                continue
            self._owner = owner
            self._predecessor = predecessor
            return
        raise FencedError(f"other brokers have claimed the bucket {_CLAIMS} times at the same time as this one")

    async def _find_state(self) -> None:
        """The newest state in the objects that the next root covers: nothing looks for it there any more then."""
        self._state = await reads.read_newest_state(self._bucket, self._uploads)

    @property
    def _epoch(self) -> int:
        return self.root.epoch if self.root is not None else 0

    def _must_own(self) -> None:
        if not self.is_owner:
            raise FencedError(self.fenced or "this broker has not claimed the bucket")

    def add(self, entry: Entry, state: bytes = b"") -> None:
        """Add an upload object that was written. It begins where the last one ends.

        ``state``: the one that it has, for the next root: no one looks for it in an object that a root covers.
        """
        self._must_own()
        if entry.object.begin != self.end or entry.object.end <= self.end:
            raise ValueError(
                f"{entry.object.name} covers the log from {entry.object.begin} to {entry.object.end}; the next object "
                f"begins at {self.end}"
            )
        self._append([compact(entry)])
        self._state = state or self._state

    def change(self, remove: Collection[StoredObject], add: Sequence[Entry]) -> None:
        """Put other objects in the place of some (a join), or remove some (expiry).

        Raises ValueError if one of them is missing, or is there already: then nothing is changed.
        """
        self._must_own()
        self._pages.change(remove, add)
        self.unsaved_changes += 1

    async def save(self, state: bytes | None = None, indexes: Sequence[str] | None = None) -> None:
        """Write the pages that have changed, state and index files if they are given, and the root that names them.

        Without ``state`` the root gets that of the last object which had one, or keeps its own; without ``indexes`` it
        keeps those that it has, or gets those of a save that has failed. Their list is written if it has
        changed. Raises FencedError if another broker has claimed the bucket; OSError, also if the root would be too
        large or is damaged.
        """
        async with self._lock:
            self._must_own()
            await self._save(state, indexes)

    async def _save(self, state: bytes | None, indexes: Sequence[str] | None) -> None:
        try:
            await self._write(self._epoch, self._owner, state, indexes)
        except ChangedError as error:
            self.fenced = str(error)
            if self.unsaved and self.root is not None:
                self.lost_from = self.root.end
            self._garbage.clear()
            raise FencedError(self.fenced) from error
        except BucketFormatError as error:
            # As a store that fails: it costs local disk until it is repaired, and the broker goes on.
            raise OSError(str(error)) from error

    async def _write(self, epoch: int, owner: str, state: bytes | None, indexes: Sequence[str] | None) -> None:
        """Write pages, state, list of index files and root. Raises ChangedError if the root is another owner's."""
        pages = self._pages.arrange()
        if state is not None:
            self._state = state
        # Those of a failed save are replaced in any case: its root may be in the bucket.
        if indexes is not None and (self._indexes is not None or tuple(indexes) != self.indexes):
            self._indexes = tuple(indexes)
        files = self._indexes
        end, newest = self.end, self._state
        unsaved, changes = self.unsaved, self.unsaved_changes
        self._sequence += 1
        # Is there room in the root? If not, no page should be written in vain.
        guess = (PageRef(page_name(self._sequence, epoch, 0), MOST_PAGE_BYTES, 1),)
        self._next_root(epoch, owner, end, [page.refs or guess for page in pages], None, None)
        number = 0
        for page in pages:
            if page.refs is None:
                parts = await self._bucket.run(_encode, page.entries)
                refs = []
                for data, objects in parts:
                    name = await self._create(partial(page_name, epoch=epoch, number=number), data)
                    refs.append(PageRef(name, len(data), objects))
                    number += 1
                page.refs = tuple(refs)  # be it for a later root: a page is not written for each try
        named = None if newest is None else await self._create(partial(state_name, epoch=epoch), newest)
        listed = None if files is None else ""
        if files:
            listed = await self._create(
                partial(indexes_name, epoch=epoch), await self._bucket.run(encode_indexes, files)
            )
        saved = [page.refs or () for page in pages]
        await self._replace(partial(self._next_root, epoch, owner, end, saved, named, listed))
        self.unsaved -= unsaved
        self.unsaved_changes -= changes
        self._uploads = []
        if self._state is newest:
            self._state = None
        if files is not None:
            self.indexes, self._indexes, self.lost_list = files, None, ""

    async def _create(self, name_of: Callable[[int], str], data: bytes) -> str:
        """Write an object under a name with the sequence number of the next root; return the name.

        A name that exists may be that of an older claim that was not completed: another one is taken.
        """
        names_left = _NAMES
        while True:
            name = name_of(self._sequence)
            self._written.add(name)
            try:
                await self._bucket.create(name, [data])
            except FileExistsError:
                names_left -= 1
                if not names_left:
                    raise
                self._sequence += 1
            else:
                return name

    def _next_root(
        self,
        epoch: int,
        owner: str,
        end: int,
        pages: Sequence[Sequence[PageRef]],
        state: str | None,
        indexes: str | None,
    ) -> tuple[Root, bytes]:
        before = self.root
        if state is None:
            state = before.state if before is not None else ""
        if indexes is None:
            indexes = before.indexes if before is not None else ""
        refs = tuple(ref for page in pages for ref in page)
        root = Root(self._cluster, self._broker, epoch, owner, self._sequence, end, refs, state, indexes)
        return root, encode_root(root)

    async def _replace(self, next_root: Callable[[], tuple[Root, bytes]]) -> None:
        """Replace the root. Raises ChangedError if it is another owner's. ``next_root`` is called for each attempt."""
        for _ in range(_CLAIMS):
            root, data = next_root()
            try:
                version: str | None = await self._bucket.replace(ROOT, data, self._version)
            except ChangedError:
                found, version = await reads.read_root(self._bucket, self._cluster, self._broker)
                if found is None:
                    raise OSError(f"{ROOT} in the bucket has been deleted") from None
                if (found.epoch, found.owner) != (root.epoch, root.owner) or found.sequence > root.sequence:
                    raise ChangedError(
                        f"the bucket has another owner: epoch {found.epoch}, {found.owner}; this broker is that of "
                        f"epoch {root.epoch}, {root.owner}"
                    ) from None
                if found != root:
                    # An attempt before this one, whose reply was lost.
                    self._written.update(_names(self.root))
                    self.root, self._version = found, version
                    continue
            unnamed = self._written.union(_names(self.root)).difference(_names(root))
            self._garbage.extend(sorted(unnamed))
            self._written.clear()
            self.root, self._version = root, version
            return
        raise OSError(f"the object store refuses to replace {ROOT} although it has not changed")

    def garbage_pages(self) -> list[str]:
        """Pages, states and lists of index files that no root names any more, each of them once.

        They are to be deleted, but not before all who read an older root are done.
        """
        garbage, self._garbage = self._garbage, []
        return garbage

    async def read_entry(self, name: ObjectName) -> Entry:
        """The entry of an upload object in the bucket. Raises OSError and BucketFormatError."""
        return (await reads.read_upload(self._bucket, name)).entry

    async def read_directory(self, stored: StoredObject, length: int | None = None) -> Directory:
        """The directory of an object: one request, two at most if only its name and ``length`` are known.

        Raises FileNotFoundError if the object has been deleted: then the manifest has changed.
        """
        return await reads.read_directory(self._bucket, stored, length)


def _encode(entries: Sequence[Entry]) -> list[tuple[bytes, int]]:
    return [(data, len(part)) for part, data in split_pages(entries, MOST_PAGE_BYTES)]


def _names(root: Root | None) -> set[str]:
    """Names of the pages, of the state and of the list of index files."""
    return set() if root is None else {*(ref.name for ref in root.pages), root.state, root.indexes} - {""}
