"""Reads a manifest for a check: what cannot be read of it is noted, and the rest is read all the same."""

from collections.abc import Callable
from typing import Final, NamedTuple

from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest_reads import (
    Upload,
    read_chain,
    read_indexes,
    read_page,
    read_root,
)
from trimq.protocol.bucket_manifest import Entry, PageRef, Root, StretchRows
from trimq.protocol.bucket_object import BucketFormatError

_READS: Final = 4
"""How often a read begins again because the owner has replaced the root meanwhile."""


class Entries(NamedTuple):
    """What a root names, and the upload objects behind its end. ``lost``: what could not be read."""

    root: Root
    entries: list[Entry]
    chain: list[Upload]
    indexes: tuple[str, ...]
    lost: list[str]


async def read_entries(bucket: Bucket, cluster: str, broker: str, page_read: Callable[[], None]) -> Entries | None:
    """The manifest as it is now; None if there is none. ``page_read``: called for each page.

    Raises OSError, and BucketFormatError if the root cannot be read.
    """
    for reads_left in reversed(range(_READS)):
        root, version = await read_root(bucket, cluster, broker)
        if root is None:
            return None
        lost: list[str] = []
        missing = False
        entries: list[Entry] = []
        for ref in root.pages:
            try:
                page = await read_page(bucket, ref)
            except FileNotFoundError as error:
                missing = True
                lost.append(_page_lost(ref, str(error)))
            except BucketFormatError as error:
                lost.append(_page_lost(ref, str(error)))
            else:
                _add(entries, page)
            page_read()
        indexes: tuple[str, ...] = ()
        try:
            if root.indexes:
                indexes = await read_indexes(bucket, root.indexes)
        except FileNotFoundError as error:
            missing = True
            lost.append(f"the list of index files {root.indexes} has gone: {error}")
        except BucketFormatError as error:
            lost.append(str(error))
        chain: list[Upload] = []
        try:
            chain = await read_chain(bucket, root.epoch, root.end)
        except FileNotFoundError as error:
            missing = True
            lost.append(f"an upload object has gone: {error}")
        except BucketFormatError as error:
            lost.append(f"{error}. What was uploaded after it cannot be found")
        if missing and reads_left and (await read_root(bucket, cluster, broker)).version != version:
            continue
        return Entries(root, [*entries, *(upload.entry for upload in chain)], chain, indexes, lost)
    raise AssertionError


def _page_lost(ref: PageRef, why: str) -> str:
    return f"{ref.objects} objects of the page {ref.name}: {why}"


def _add(entries: list[Entry], page: list[Entry]) -> None:
    """Add the objects of a page. One that did not fit it is also the first one of the next page."""
    if entries and page and entries[-1].object == page[0].object:
        rows = StretchRows.joined(entries[-1].stretches, page[0].stretches)
        entries[-1] = Entry(page[0].object, rows)
        page = page[1:]
    entries.extend(page)
