"""What ``mqstore tiered ls`` prints of a bucket: all of it is in the manifest."""

from collections.abc import Iterator

from msgspec import Struct

from trimq.broker.store.tiered.bucket.index_objects import parse_index_name
from trimq.broker.tools.offline_bucket import OfflineBucket
from trimq.broker.tools.tier_listing import time_text, times_text


class ListedQueue(Struct, rename="camel"):
    """A queue. Times are ms, null if all its messages have expired; then it only has an end."""

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    messages: int = 0
    bytes: int = 0
    objects: int = 0
    begin_timestamp: int | None = None
    end_timestamp: int | None = None


class ListedObject(Struct, rename="camel"):
    """An object with messages, and the stretch of the log that it covers."""

    name: str
    begin: int
    end: int
    generation: int
    epoch: int
    length: int
    queues: int
    messages: int
    is_saved: bool
    """Whether a page of the root names it; otherwise it was uploaded since."""


class ListedIndex(Struct, rename="camel"):
    """An index file: its keys belong to messages below the log offset ``upto``."""

    name: str
    length: int | None
    upto: int | None
    begin_timestamp: int | None
    end_timestamp: int | None


class ListedPage(Struct, rename="camel"):
    """A page of the manifest."""

    name: str
    length: int
    objects: int


class ListedRoot(Struct, rename="camel"):
    """The root: whose the bucket is, and what it names."""

    epoch: int
    owner: str
    sequence: int
    end: int
    pages: list[ListedPage]
    state: str | None


class BucketListing(Struct, rename="camel"):
    """All of it. ``end``: the log offset behind the last object."""

    bucket: str
    cluster: str
    broker: str
    end: int
    root: ListedRoot
    queues: list[ListedQueue]
    objects: list[ListedObject]
    index: list[ListedIndex]


async def list_bucket(found: OfflineBucket, topics: frozenset[str] = frozenset()) -> BucketListing:
    """Read the manifest; of some topics only if there are any in ``topics``.

    Raises NotUsableError, OSError, BucketFormatError.
    """
    manifest, root = await found.load()
    pages = [ListedPage(*page) for page in root.pages]
    listed = ListedRoot(root.epoch, root.owner, root.sequence, root.end, pages, root.state or None)
    queues: dict[tuple[str, int], ListedQueue] = {}
    objects: list[ListedObject] = []
    for entry in manifest.entries:
        stored = entry.object
        stretches = [stretch for stretch in entry.stretches if not topics or stretch.topic in topics]
        for stretch in stretches:
            key = stretch.topic, stretch.queue_id
            queue = queues.get(key)
            if queue is None:
                queue = queues[key] = ListedQueue(*key, stretch.offset, stretch.end)
            queue.max_offset = max(queue.max_offset, stretch.end)
            if not stretch.messages:  # it only says where the queue ended
                continue
            queue.min_offset = min(queue.min_offset, stretch.offset) if queue.messages else stretch.offset
            queue.messages += stretch.messages
            queue.bytes += stretch.size
            queue.objects += 1
            begin, end = queue.begin_timestamp, queue.end_timestamp
            queue.begin_timestamp = stretch.begin_ms if begin is None else min(begin, stretch.begin_ms)
            queue.end_timestamp = stretch.end_ms if end is None else max(end, stretch.end_ms)
        if stored.length and (stretches or not topics):
            numbers = stored.begin, stored.end, stored.generation, stored.epoch, stored.length
            count = sum(stretch.messages for stretch in stretches)
            objects.append(ListedObject(stored.name, *numbers, len(stretches), count, stored.begin < root.end))
    index = [] if topics else [_index(name) for name in manifest.indexes]
    ordered = [queue for _, queue in sorted(queues.items())]
    return BucketListing(found.url, found.cluster, found.broker, manifest.end, listed, ordered, objects, index)


def _index(name: str) -> ListedIndex:
    parts = parse_index_name(name)
    if parts is None:
        return ListedIndex(name, None, None, None, None)
    return ListedIndex(name, parts.size, parts.upto, parts.stamp, parts.end_ms)


def bucket_lines(listing: BucketListing, *, segments: bool) -> Iterator[str]:
    """The same for people. Times are UTC. ``segments``: a line for each object, too."""
    root = listing.root
    saved = sum(listed.is_saved for listed in listing.objects)
    yield f"bucket      {listing.bucket}"
    yield f"owner       {root.owner}, epoch {root.epoch}; the root was replaced {root.sequence} times"
    yield (
        f"log         up to offset {listing.end}; the root names {saved} objects up to {root.end}, "
        f"{len(listing.objects) - saved} were uploaded since"
    )
    yield f"state       {root.state or '-'}"
    for page in root.pages:
        yield f"page        {page.name}, {page.length} bytes, {page.objects} objects"
    titles = f"{'topic':32} {'queue':>5} {'first':>12} {'end':>12} {'messages':>12} {'bytes':>15} {'objects':>8}"
    yield f"{titles}  {times_text('oldest', 'newest')}"
    for queue in listing.queues:
        times = times_text(time_text(queue.begin_timestamp), time_text(queue.end_timestamp))
        yield (
            f"{queue.topic:32} {queue.queue_id:5} {queue.min_offset:12} {queue.max_offset:12} {queue.messages:12} "
            f"{queue.bytes:15} {queue.objects:8}  {times}"
        )
    for listed in listing.objects if segments else []:
        yield (
            f"object      log {listed.begin:15} to {listed.end:15}  generation {listed.generation} "
            f"epoch {listed.epoch}  {listed.length:12} bytes, {listed.messages} messages of {listed.queues} queues  "
            f"{listed.name}"
        )
    for file in listing.index:
        times = times_text(time_text(file.begin_timestamp), time_text(file.end_timestamp))
        yield f"index       {file.length or 0:12} bytes, log up to {file.upto or 0:15}  {times}  {file.name}"
