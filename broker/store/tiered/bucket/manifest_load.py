"""Loads a bucket's manifest: root, pages, index files, and the chain of upload objects behind the root's end."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from trimq.broker.store.tiered.bucket import manifest_reads as reads
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest_pages import Page
from trimq.protocol.bucket_manifest import Entry, PageRef, Root, StretchRows
from trimq.protocol.bucket_object import BucketFormatError

_READS: Final = 4
"""How often a load begins again because the owner has deleted what an older root named."""


class Loaded(NamedTuple):
    """A manifest as it was read. ``version``: the root's, for ``replace``. ``chain``: what the root does not cover.

    ``lost_list``: why the list of index files could not be read; then ``indexes`` are those that the bucket has.
    """

    root: Root | None
    version: str | None
    pages: Sequence[Page]
    chain: list[reads.Upload]
    indexes: tuple[str, ...]
    lost_list: str = ""


async def load(bucket: Bucket, cluster: str, broker: str, known: Loaded) -> Loaded:
    """What the bucket has. What is ``known`` from before is not read again. Raises OSError and BucketFormatError."""
    reads_left = _READS
    while True:
        root, version = await reads.read_root(bucket, cluster, broker)
        try:
            return await _load(bucket, root, version, known)
        except FileNotFoundError as error:
            reads_left -= 1
            if not reads_left:
                raise BucketFormatError(
                    f"the manifest names what is not there: {error}. Restore it from a backup of the bucket"
                ) from error


async def _load(bucket: Bucket, root: Root | None, version: str | None, known: Loaded) -> Loaded:
    if root is None:
        return Loaded(None, version, [], [], ())
    read: dict[PageRef, Page] = {}
    uploads: list[reads.Upload] = []
    names: tuple[str, ...] | None = None
    lost = ""
    old = known.root
    if old is not None and (root.epoch, root.sequence) >= (old.epoch, old.sequence):
        read = {page.refs[0]: page for page in known.pages if page.refs is not None and len(page.refs) == 1}
        uploads = known.chain
        if root.indexes == old.indexes:
            names, lost = known.indexes, known.lost_list
    pages: list[Page] = []
    for ref in root.pages:
        page = read.get(ref) or Page(await reads.read_page(bucket, ref), (ref,))
        _join(pages, page)
    if names is None and root.indexes:
        try:
            names = await reads.read_indexes(bucket, root.indexes)
        except (FileNotFoundError, BucketFormatError) as error:
            if (await reads.read_root(bucket, root.cluster, root.broker)).version != version:
                raise FileNotFoundError(*error.args) from error  # the owner has replaced both meanwhile
            lost = str(error)
    chain = await reads.read_chain(bucket, root.epoch, root.end, uploads)
    if names is None and lost:
        entries = [*(entry for page in pages for entry in page.entries), *(upload.entry for upload in chain)]
        names = await reads.find_indexes(bucket, root.epoch, entries)
    return Loaded(root, version, pages, chain, names or (), lost)


def _join(pages: list[Page], page: Page) -> None:
    """Add a page as it was read. An object that did not fit one page is at the end of one and the start of the next."""
    last = pages[-1].entries[-1] if pages and pages[-1].entries else None
    if last is None or not page.entries or last.object != page.entries[0].object:
        pages.append(page)
        return
    both = Entry(last.object, StretchRows.joined(last.stretches, page.entries[0].stretches))
    refs = (*(pages[-1].refs or ()), *(page.refs or ()))
    pages[-1] = Page([*pages[-1].entries[:-1], both, *page.entries[1:]], refs)
