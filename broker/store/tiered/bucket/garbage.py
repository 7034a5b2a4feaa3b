"""Objects that belong to the history no more: replaced by a join, expired, or left behind by an interrupted write.

They are deleted after a grace: consumers, slaves and queries that have read the manifest before still read them.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.index_objects import parse_index_name
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.manifest_reads import may_be_named
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo
from trimq.protocol.bucket_manifest import Root
from trimq.protocol.bucket_names import INDEX_LISTS, PAGES, ROOT, ObjectName, parse_name, parse_saved

_AT_ONCE: Final = 1000


class Garbage:
    """The names that wait for their deletion. Those of a process that ends are found by ``find_garbage``."""

    def __init__(self, bucket: Bucket, monotonic: Callable[[], float], grace_ms: int) -> None:
        self._bucket = bucket
        self._monotonic = monotonic
        self._grace = grace_ms / 1000
        self._waiting: deque[tuple[float, str]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def names(self) -> set[str]:
        """What waits."""
        return {name for _, name in self._waiting}

    def add(self, names: Sequence[str]) -> None:
        """Objects that the root does not name any more."""
        due = self._monotonic() + self._grace
        self._waiting.extend((due, name) for name in names)

    async def delete_due(self) -> int:
        """Delete what has waited long enough; return the number of objects. Raises OSError; then they still wait."""
        now, count = self._monotonic(), 0
        while self._waiting and self._waiting[0][0] <= now:
            names = [name for due, name in self._waiting if due <= now][:_AT_ONCE]
            await self._bucket.delete(names)
            for _ in names:
                self._waiting.popleft()
            count += len(names)
        return count


class Search(NamedTuple):
    """What a search has found. ``strange``: names that no broker gives; they are left alone.

    ``before_ms``: what is garbage was written before this time, by the clock of the object store. ``is_early``: the
    root was replaced within the grace, and the one before may have named what seems to be garbage: nothing is.
    """

    garbage: list[ObjectInfo]
    strange: list[ObjectInfo]
    before_ms: int
    is_early: bool = False


async def find_garbage(
    bucket: Bucket, manifest: Manifest, now_ms: int, grace_ms: int, own: Collection[str] = ()
) -> list[ObjectInfo]:
    """The objects of the broker that the owner's manifest does not name, and that are older than the grace.

    The owner calls this while it does not join. ``own``: the index files that it is about to name. See ``search``.
    """
    return (await search(bucket, manifest, now_ms, grace_ms, own)).garbage


async def search(
    bucket: Bucket, manifest: Manifest, now_ms: int, grace_ms: int, own: Collection[str] | None = None
) -> Search:
    """Look through all objects of the broker.

    ``manifest``: the owner's, or just loaded; ``own``: see find_garbage, None if this is not the owner. The clock of
    the object store counts, as far as its newest object shows it: this machine's may be ahead of it, and then what is
    being written now would be old. Raises OSError.
    """
    root = manifest.root
    if root is None:
        return Search([], [], 0)
    indexes = manifest.indexes
    found: list[ObjectInfo] = []
    newest, after, root_ms = 0, "", 0
    while True:
        listed = await bucket.list("", after, _AT_ONCE)
        root_ms = max([root_ms, *(info.modified_ms for info in listed if info.name == ROOT)])
        # After the listing: what was written meanwhile is named now.
        named = {*_named(manifest, root), *indexes}
        found += [info for info in listed if info.name not in named]
        newest = max([newest, *(info.modified_ms for info in listed)])
        if len(listed) < _AT_ONCE:
            break
        after = listed[-1].name
    before = min(now_ms, newest) - grace_ms
    garbage = [info for info in found if info.modified_ms < before and not may_be_named_later(info.name, manifest, own)]
    # The owner knows what its roots have replaced; others know only when the last one came.
    is_early = own is None and now_ms - root_ms < grace_ms
    return Search(
        [] if is_early else [info for info in garbage if kind_of(info.name)],
        [info for info in found if not kind_of(info.name)],
        before,
        is_early,
    )


def kind_of(name: str) -> str:
    """What an object is, in words; empty if no broker gives such a name."""
    parts = parse_name(name)
    if parts is not None:
        return "segment" if parts.generation else "upload object"
    if parse_saved(name) is not None:
        if name.startswith(INDEX_LISTS):
            return "index list"
        return "page" if name.startswith(PAGES) else "state"
    return "index file" if parse_index_name(name) is not None else ""


def _named(manifest: Manifest, root: Root) -> Iterator[str]:
    yield ROOT
    for ref in root.pages:
        yield ref.name
    if root.state:
        yield root.state
    if root.indexes:
        yield root.indexes
    for entry in manifest.entries:
        if entry.object.length:
            yield entry.object.name


def may_be_named_later(name: str, manifest: Manifest, own: Collection[str] | None = None) -> bool:
    """Whether a broker, which may only have been frozen, can still make this object a part of the history.

    ``manifest`` has a root, which may be older than the one in the bucket. ``own``: see ``search``.
    """
    root = manifest.root
    assert root is not None
    parts = parse_name(name)
    if parts is not None:
        if parts.epoch != root.epoch or not parts.generation:
            return parts.epoch > root.epoch or (parts.epoch == root.epoch and parts.begin >= manifest.end)
        return own is None and _may_replace(parts, manifest)
    index = parse_index_name(name)
    if index is None:
        return may_be_named(name, root)
    if own is not None or index.epoch != root.epoch:
        return name in (own or ()) or index.epoch > root.epoch
    # They are uploaded in the order of their stamps, and named afterwards.
    stamps = [named.stamp for named in map(parse_index_name, manifest.indexes) if named is not None]
    return index.stamp > max(stamps, default=-1)


def _may_replace(segment: ObjectName, manifest: Manifest) -> bool:
    """Whether a join may be under way: what it replaces is in the manifest as long as it can succeed."""
    return any(
        entry.object.generation < segment.generation
        and entry.object.length
        and entry.object.begin < segment.end
        and entry.object.end > segment.begin
        for entry in manifest.entries
    )
