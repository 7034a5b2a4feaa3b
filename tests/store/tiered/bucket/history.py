"""Upload objects and segments for tests of the manifest: small, with blocks that nothing reads."""

from collections.abc import Sequence

from tests.store.tiered.bucket.faulty_store import BROKER, CLUSTER, FaultyStore
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.protocol.bucket_manifest import Entry, PageRef, StoredObject, stretches_of
from trimq.protocol.bucket_names import ObjectName
from trimq.protocol.bucket_object import HEADER_SIZE, Block, Kind, ObjectHeader, decode_end, encode_end, encode_header

STRETCH = 1000
"""Bytes of the log that an object covers, unless a test says otherwise."""


def built(
    begin: int,
    end: int = 0,
    *,
    epoch: int = 1,
    generation: int = 0,
    number: int = 0,
    queues: int = 1,
    state: bytes = b"",
    topic: str = "T",
) -> tuple[Entry, bytes]:
    """An object with a message for each queue, and its bytes."""
    end = end or begin + STRETCH
    blocks = []
    at = HEADER_SIZE
    for queue in range(queues):
        blocks.append(Block(topic, queue, begin // STRETCH, 1, 80, at, begin, begin, begin, end, 0))
        at += blocks[-1].length
    kind = Kind.SEGMENT if generation else Kind.LOG
    head = encode_header(ObjectHeader(kind, epoch, begin, end, 7)) + bytes(at - HEADER_SIZE)
    data = head + encode_end(blocks, at, state)
    directory = decode_end(data, len(data))
    stored = StoredObject(begin, end, generation, epoch, number, len(data), directory.position)
    return Entry(stored, stretches_of(directory)), data


def manifest(bucket: Bucket, owner: str = "") -> Manifest:
    """The manifest of the tests' broker; ``owner``: the name that a claim takes."""
    if not owner:
        return Manifest(bucket, CLUSTER, BROKER)
    return Manifest(bucket, CLUSTER, BROKER, new_owner=lambda: owner)


def epoch_of(owner: Manifest) -> int:
    assert owner.root is not None
    return owner.root.epoch


def pages_of(owner: Manifest) -> Sequence[PageRef]:
    assert owner.root is not None
    return owner.root.pages


async def upload(bucket: Bucket, owner: Manifest, count: int = 1, *, queues: int = 1, state: bytes = b"") -> None:
    """Write the next objects of the log and add them to the manifest."""
    for _ in range(count):
        entry, data = built(owner.end, epoch=epoch_of(owner), queues=queues, state=state)
        await bucket.create(entry.object.name, [data])
        owner.add(entry, state)


async def join(bucket: Bucket, owner: Manifest, parts: Sequence[Entry]) -> Entry:
    """Write a segment that replaces these objects; the manifest has it then."""
    begin, end = parts[0].object.begin, parts[-1].object.end
    generation = max(part.object.generation for part in parts) + 1
    entry, data = built(begin, end, epoch=epoch_of(owner), generation=generation)
    await bucket.create(entry.object.name, [data])
    owner.change([part.object for part in parts], [entry])
    return entry


def late_upload(store: FaultyStore, owner: Manifest, error: OSError | None = None) -> None:
    """Let an object of ``owner`` arrive just before the next root; the reply to that request is ``error``."""
    replaced = store.store.replace

    def late(name: str, data: bytes, version: str | None) -> str:
        entry, content = built(owner.end, state=b"late")
        store.put(entry.object.name, content)
        store.store.replace = replaced  # type: ignore[method-assign]
        new = replaced(name, data, version)
        if error is not None:
            raise error
        return new

    store.store.replace = late  # type: ignore[method-assign]


def check_history(entries: Sequence[Entry], end: int, begin: int = 0) -> None:
    """Objects follow each other from ``begin`` to ``end``: nothing is missing, and nothing is there twice."""
    for entry in entries:
        assert entry.object.begin == begin, entry.object
        begin = entry.object.end
    assert begin == end


def check_named(store: FaultyStore, loaded: Manifest) -> None:
    """All that the root names is in the bucket, except for index files."""
    assert loaded.root is not None
    names = {ref.name for ref in loaded.root.pages} | {entry.object.name for entry in loaded.entries}
    assert names | ({loaded.root.state, loaded.root.indexes} - {""}) <= set(store.objects())


def name(begin: int, epoch: int = 1) -> str:
    """The name of an upload object."""
    return str(ObjectName(begin, 0, 0, epoch, 0))
