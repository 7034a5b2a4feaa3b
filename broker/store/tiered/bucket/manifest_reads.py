"""Reads of a bucket's manifest: its root, pages, and the upload objects behind its end.

A damaged object raises BucketFormatError with its name and what can be done. OSError is that of the bucket; among them
FileNotFoundError for an object that the owner has deleted meanwhile: who reads then begins again with the root.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.index_objects import parse_index_name
from trimq.protocol.bucket_manifest import (
    Entry,
    PageRef,
    Root,
    StoredObject,
    decode_indexes,
    decode_page,
    decode_root,
    stretches_of,
)
from trimq.protocol.bucket_names import INDEXES, LOG, ROOT, ObjectName, parse_name, parse_saved
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


class Upload(NamedTuple):
    """An upload object, and the position, length and CRC-32 of its state; the length is 0 if it has none."""

    entry: Entry
    state: tuple[int, int, int]


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


async def read_indexes(bucket: Bucket, name: str) -> tuple[str, ...]:
    """The index files in a list that the root names."""
    data = (await bucket.read(name)).data
    with _errors(bucket.prefix + name, "Restore it from a backup of the bucket"):
        return await bucket.run(decode_indexes, data)


async def find_indexes(bucket: Bucket, epoch: int, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The index files of a history in the bucket, in place of a list that cannot be read. ``epoch``: that of the root.

    Among them may be some that were not named yet or not any more: a key that is found twice does no harm. What an
    owner has written after it was fenced is left out: it may seem to have the keys of messages that the next owner has
    uploaded. Both had the same history up to the first object of the next owner.
    """
    begins: dict[int, int] = {}
    for entry in entries:
        if not entry.object.generation:
            begins.setdefault(entry.object.epoch, entry.object.begin)
    found: dict[int, str] = {}
    after = ""
    while True:
        listed = await bucket.list(INDEXES, after, _LISTED)
        for info in listed:
            parts = parse_index_name(info.name)
            if parts is None or parts.epoch > epoch:
                continue
            if all(parts.upto <= begin for later, begin in begins.items() if later > parts.epoch):
                found[parts.stamp] = info.name  # the last one of several attempts to upload a file
        if len(listed) < _LISTED:
            return tuple(found.values())
        after = listed[-1].name


async def read_directory(bucket: Bucket, stored: StoredObject, length: int | None = None) -> Directory:
    """The directory of an object, by one request; by two if it is long and ``length`` is all that is known."""
    if length is None:
        begin, length = stored.directory, stored.length
    else:
        begin = max(0, length - END_GUESS)
    with _errors(bucket.prefix + stored.name, "`mqstore tiered verify` lists what is damaged"):
        return await _read_directory(bucket, stored.name, begin, length)


async def _read_directory(bucket: Bucket, name: str, begin: int, length: int) -> Directory:
    try:
        data = bytes(await bucket.read_range(name, begin, length - begin))
    except FileNotFoundError:
        raise
    except OSError as error:
        # One that ends before ``begin`` gives the same error as an object store that is away.
        for info in await bucket.list(name[:-1]):
            if info.name == name and info.size < length:
                raise BucketFormatError(f"it has {info.size} bytes instead of {length}") from error
        raise
    if len(data) != length - begin:
        raise BucketFormatError(f"it has fewer than {length} bytes")
    position, _ = directory_place(data[-FOOTER_SIZE:], length)
    if position < begin:
        data = bytes(await bucket.read_range(name, position, begin - position)) + data
    return await bucket.run(decode_end, data, length)


async def read_chain(bucket: Bucket, epoch: int, end: int, known: Iterable[Upload] = ()) -> list[Upload]:
    """The upload objects of an epoch from a log offset on, each of which begins where the one before ends.

    Those that are ``known`` are not read again. Objects that do not belong to the chain are garbage.
    """
    read = {(upload.entry.object.name, upload.entry.object.length): upload for upload in known}
    chain: list[Upload] = []
    after = _in_front_of(end)
    while True:
        found = await bucket.list(LOG, after, _LISTED)
        for info in found:
            name = parse_name(info.name)
            if name is None or name.epoch != epoch or name.begin < end:
                continue
            if name.begin > end:
                return chain
            upload = read.get((info.name, info.size)) or await read_upload(bucket, name, info.size)
            chain.append(upload)
            end = upload.entry.object.end
        if len(found) < _LISTED:
            return chain
        after = found[-1].name


async def greatest_epoch(bucket: Bucket, end: int) -> int:
    """The greatest epoch of the upload objects from a log offset on; 0 if there are none.

    It may be greater than that of the root, if an older root was restored from a backup: then its names are in use.
    """
    epoch, after = 0, _in_front_of(end)
    while True:
        found = await bucket.list(LOG, after, _LISTED)
        epoch = max([epoch, *(name.epoch for name in map(parse_name, (info.name for info in found)) if name)])
        if len(found) < _LISTED:
            return epoch
        after = found[-1].name


def _in_front_of(begin: int) -> str:
    """What sorts in front of the names of all upload objects from a log offset on."""
    return f"{LOG}{begin:020d}"


async def read_upload(bucket: Bucket, name: ObjectName, length: int | None = None) -> Upload:
    """An upload object, by its name; one request more if its length is not known."""
    text = str(name)
    if length is None:
        found = await bucket.list(LOG, _in_front_of(name.begin), _LISTED)
        length = next((info.size for info in found if info.name == text), None)
        if length is None:
            raise FileNotFoundError(f"{text} is not in the bucket")
    advice = "If the broker's log still has its messages, delete the object: it will be uploaded anew"
    with _errors(bucket.prefix + text, advice):
        if length < HEADER_SIZE + FOOTER_SIZE:
            raise BucketFormatError(f"an object of {length} bytes is cut off")
        header = decode_header(await bucket.read_range(text, 0, HEADER_SIZE))
        if (header.kind, header.epoch, header.begin) != (Kind.LOG, name.epoch, name.begin):
            raise BucketFormatError("its header is that of another object")
        if header.end <= header.begin:
            raise BucketFormatError(f"it covers the log from {header.begin} to {header.end}")
        directory = await _read_directory(bucket, text, max(0, length - END_GUESS), length)
    stored = StoredObject(header.begin, header.end, 0, header.epoch, 0, length, directory.position)
    state = directory.state_position, directory.state_length, directory.state_crc
    return Upload(Entry(stored, await bucket.run(stretches_of, directory)), state)


async def read_newest_state(bucket: Bucket, chain: Sequence[Upload]) -> bytes | None:
    """The state of the last upload object that has one; None if none has."""
    for upload in reversed(chain):
        position, length, _ = upload.state
        if length:
            name = upload.entry.object.name
            with _errors(bucket.prefix + name, "`mqstore tiered verify` lists what is damaged"):
                data = bytes(await bucket.read_range(name, position, length))
                return Directory([], (), state=upload.state).checked_state(data)
    return None


def may_be_named(name: str, root: Root) -> bool:
    """Whether a save or claim that is under way may still name a page, state or list that the root does not name.

    Such an object is not garbage, however old it is: its broker may only have been frozen.
    """
    saved = parse_saved(name)
    if saved is None:
        return False
    sequence, epoch = saved
    return epoch > root.epoch or (epoch == root.epoch and sequence > root.sequence)
