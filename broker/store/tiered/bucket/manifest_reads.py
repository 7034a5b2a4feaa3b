"""Reads of a bucket's manifest: its root, pages, and the upload objects behind its end.

A damaged object raises BucketFormatError with its name and what can be done. OSError is that of the bucket; among them
FileNotFoundError for an object that the owner has deleted meanwhile: who reads then begins again with the root.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.protocol.bucket_manifest import (
    Entry,
    PageRef,
    Root,
    StoredObject,
    decode_page,
    decode_root,
    stretches_of,
)
from trimq.protocol.bucket_names import LOG, ROOT, parse_name, parse_saved
from trimq.protocol.bucket_object import (
    FOOTER_SIZE,
    HEADER_SIZE,
    BucketFormatError,
    Directory,
    Kind,
    decode_end,
    decode_header,
    directory_place,
)

END_GUESS: Final = 64 * 1024
"""Bytes that are read of the end of an object of which only the length is known. Most directories are shorter."""
_LISTED: Final = 1000


class StoredRoot(NamedTuple):
    """The root, and its version in the bucket for ``replace``; both empty if there is none."""

    root: Root | None
    version: str | None


@contextmanager
def _errors(name: str, advice: str) -> Iterator[None]:
    try:
        yield
    except BucketFormatError as error:
        raise BucketFormatError(f"{name} in the bucket: {error}. {advice}") from error


async def read_root(bucket: Bucket, cluster: str, broker: str) -> StoredRoot:
    """The root. A bucket that has objects of the broker but no root is refused: with a new root they were garbage."""
    for again in (True, False):
        try:
            data, version = await bucket.read(ROOT)
        except FileNotFoundError:
            found = await bucket.list("", count=1)
            if not found:
                return StoredRoot(None, None)
            if again:  # another broker may have written the first root just now
                continue
            raise BucketFormatError(
                f"{bucket.prefix}{ROOT} is not in the bucket, but {found[0].name} is: without its root the history "
                "cannot be read. Restore the root from a backup of the bucket, or move these objects away to begin anew"
            ) from None
        with _errors(bucket.prefix + ROOT, "Restore it from an earlier version or a backup of the bucket"):
            root = decode_root(data)
            if (root.cluster, root.broker) != (cluster, broker):
                raise BucketFormatError(f"it is that of broker {root.broker} in cluster {root.cluster}")
        return StoredRoot(root, version)
    raise AssertionError


async def read_page(bucket: Bucket, ref: PageRef) -> list[Entry]:
    """The objects of a page that the root names."""
    data = (await bucket.read(ref.name)).data
    with _errors(bucket.prefix + ref.name, "Restore it from a backup of the bucket"):
        if len(data) != ref.length:
            raise BucketFormatError(f"it has {len(data)} bytes, and the root says {ref.length}")
        entries = await bucket.run(decode_page, data)
        if len(entries) != ref.objects:
            raise BucketFormatError(f"it lists {len(entries)} objects, and the root says {ref.objects}")
    return entries


async def read_directory(bucket: Bucket, stored: StoredObject, length: int | None = None) -> Directory:
    """The directory of an object, by one request; by two if it is long and ``length`` is all that is known."""
    if length is None:
        begin, length = stored.directory, stored.length
    else:
        begin = max(0, length - END_GUESS)
    name = stored.name
    with _errors(bucket.prefix + name, "`mqstore tiered verify` lists what is damaged"):
        data = bytes(await bucket.read_range(name, begin, length - begin))
        if len(data) != length - begin:
            raise BucketFormatError(f"it has fewer than {length} bytes")
        position, _ = directory_place(data[-FOOTER_SIZE:], length)
        if position < begin:
            data = bytes(await bucket.read_range(name, position, begin - position)) + data
        return await bucket.run(decode_end, data, length)


async def read_chain(bucket: Bucket, epoch: int, end: int, known: Mapping[str, Entry]) -> list[Entry]:
    """The upload objects of an epoch from a log offset on, each of which begins where the one before ends.

    ``known``: entries that need not be read again, by name. Objects that do not belong to the chain are garbage.
    """
    chain: list[Entry] = []
    after = f"{LOG}{end:020d}"
    while True:
        found = await bucket.list(LOG, after, _LISTED)
        for info in found:
            name = parse_name(info.name)
            if name is None or name.generation or name.epoch != epoch or name.begin < end:
                continue
            if name.begin > end:
                return chain
            entry = known.get(info.name)
            if entry is None or entry.object.length != info.size:
                entry = await _read_upload(bucket, StoredObject(*name, 0, 0), info.size)
            chain.append(entry)
            end = entry.object.end
        if len(found) < _LISTED:
            return chain
        after = found[-1].name


async def _read_upload(bucket: Bucket, stored: StoredObject, length: int) -> Entry:
    name = stored.name
    advice = "If the broker's log still has its messages, delete the object: it will be uploaded anew"
    with _errors(bucket.prefix + name, advice):
        if length < HEADER_SIZE + FOOTER_SIZE:
            raise BucketFormatError(f"an object of {length} bytes is cut off")
        header = decode_header(await bucket.read_range(name, 0, HEADER_SIZE))
        if (header.kind, header.epoch, header.begin) != (Kind.LOG, stored.epoch, stored.begin):
            raise BucketFormatError("its header is that of another object")
        if header.end <= header.begin:
            raise BucketFormatError(f"it covers the log from {header.begin} to {header.end}")
    directory = await read_directory(bucket, stored, length)
    entry = stored._replace(end=header.end, length=length, directory=directory.position)
    return Entry(entry, await bucket.run(stretches_of, directory))


def may_be_named(name: str, root: Root) -> bool:
    """Whether a save or claim that is under way may still name this page or state, which the root does not name.

    Such an object is not garbage, however old it is: its broker may only have been frozen.
    """
    saved = parse_saved(name)
    if saved is None:
        return False
    sequence, epoch = saved
    return epoch > root.epoch or (epoch == root.epoch and sequence > root.sequence)
