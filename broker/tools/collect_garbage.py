"""What ``mqstore tiered gc`` finds in a bucket and deletes: what belongs to the history no more.

A broker may go on meanwhile: what it may still name, or what others may still read, is kept (garbage.py). Uploads that
were never completed are aborted by the same rules; of one whose object is there nothing is missing.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from trimq.broker.store.tiered.bucket.bucket import DELETE, LIST
from trimq.broker.store.tiered.bucket.garbage import kind_of, may_be_named_later, search
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.unfinished_uploads import UnfinishedUpload, UnfinishedUploads
from trimq.broker.tools.command_parts import Progress
from trimq.broker.tools.offline_bucket import OfflineBucket
from trimq.broker.tools.tier_listing import time_text

_AT_ONCE: Final = 1000
OTHER_STORES: Final = (
    "uploads that were never completed are only looked for in S3: let a rule of the bucket delete them"
)


class GarbageObject(Struct, rename="camel"):
    """An object that is garbage: a segment, an upload object, a page, a state, an index file or a list of them."""

    name: str
    kind: str
    length: int
    modified_timestamp: int


class GarbageUpload(Struct, rename="camel"):
    """An upload that was never completed. Its parts take space, which the object store does not say."""

    name: str
    upload_id: str
    begun_timestamp: int


class GarbageReport(Struct, rename="camel"):
    """What was found. ``strange``: names that no broker gives, which stay. ``problem``: why uploads are not listed.

    ``early``: why nothing is garbage yet.
    """

    bucket: str
    objects: list[GarbageObject] = field(default_factory=list)
    uploads: list[GarbageUpload] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    problem: str = ""
    early: str = ""
    is_deleted: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the objects."""
        return sum(found.length for found in self.objects)


async def find(found: OfflineBucket, uploads: UnfinishedUploads | None, now_ms: int) -> GarbageReport:
    """Look for garbage. Raises NotUsableError, OSError, BucketFormatError."""
    manifest, _ = await found.load()
    grace = found.tier.tiered_store_bucket_grace_time
    searched = await search(found.bucket, manifest, now_ms, grace)
    report = GarbageReport(found.url)
    report.objects = [
        GarbageObject(info.name, kind_of(info.name), info.size, info.modified_ms) for info in searched.garbage
    ]
    report.strange = [info.name for info in searched.strange]
    if searched.is_early:
        report.early = (
            f"the root was replaced less than {grace / 1000:g} s ago (tieredStoreBucketGraceTime): what it has "
            "replaced may still be read. A broker that runs deletes it itself"
        )
    if uploads is None:
        report.problem = OTHER_STORES
        return report
    try:
        report.uploads = await _find_uploads(found, manifest, uploads, now_ms)
    except OSError as error:
        report.problem = f"uploads that were never completed cannot be listed: {error}"
    return report


async def _find_uploads(
    found: OfflineBucket, manifest: Manifest, uploads: UnfinishedUploads, now_ms: int
) -> list[GarbageUpload]:
    prefix = found.bucket.prefix
    listed = await found.bucket.call(LIST, 1, uploads.list, prefix)
    before = min(now_ms, listed.now_ms) - found.tier.tiered_store_bucket_grace_time
    return [
        GarbageUpload(name, upload.upload_id, upload.begun_ms)
        for name, upload in ((upload.name.removeprefix(prefix), upload) for upload in listed.uploads)
        if upload.begun_ms < before and kind_of(name) and not may_be_named_later(name, manifest)
    ]


async def delete(
    found: OfflineBucket, uploads: UnfinishedUploads | None, report: GarbageReport, progress: Progress
) -> None:
    """Delete what was found. ``progress``: called with the number of objects and uploads. Raises OSError."""
    names = [listed.name for listed in report.objects]
    for at in range(0, len(names), _AT_ONCE):
        await found.bucket.delete(names[at : at + _AT_ONCE])
        progress(min(at + _AT_ONCE, len(names)))
    for number, upload in enumerate(report.uploads, start=1):
        assert uploads is not None
        begun = UnfinishedUpload(found.bucket.prefix + upload.name, upload.upload_id, upload.begun_timestamp)
        await found.bucket.call(DELETE, 1, uploads.abort, begun)
        progress(len(names) + number)
    report.is_deleted = True


def garbage_lines(report: GarbageReport) -> Iterator[str]:
    """The same for people. Times are UTC."""
    yield f"bucket      {report.bucket}"
    for found in report.objects:
        yield f"{found.kind:13} {found.length:15} bytes  {time_text(found.modified_timestamp)}  {found.name}"
    for upload in report.uploads:
        yield f"upload begun  {'':21}  {time_text(upload.begun_timestamp)}  {upload.name}"
    for name in report.strange:
        yield f"note        {name} is no object of a broker: it stays"
    for text in filter(None, (report.early, report.problem)):
        yield f"note        {text}"
    counts = Counter(found.kind for found in report.objects)
    sizes: Counter[str] = Counter()
    for found in report.objects:
        sizes[found.kind] += found.length
    for kind, count in sorted(counts.items()):
        yield f"garbage     {count} of kind {kind}, {sizes[kind]} bytes"
    if report.uploads:
        yield f"garbage     {len(report.uploads)} uploads that were never completed"
    if not report.objects and not report.uploads:
        yield "there is no garbage"
    elif report.is_deleted:
        yield f"deleted: {len(report.objects)} objects, {report.bytes} bytes; {len(report.uploads)} uploads aborted"
    else:
        yield f"{len(report.objects)} objects, {report.bytes} bytes: nothing was deleted; --delete does it"
