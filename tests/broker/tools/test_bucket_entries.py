"""What ``mqstore tiered verify`` says of upload objects that no root names yet."""

import pytest

from tests.store.simdisk import SimDisk
from tests.store.stores import fill, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, uploaded
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.tools.bucket_entries import Entries, read_entries


async def behind_the_root(objects: Objects) -> Bucket:
    """Three objects, the last two of which only their chain has."""
    disk = SimDisk()
    async with opened(disk, objects) as store:
        for number in range(3):
            await fill(store, 1, first=number)
            if not number:
                await uploaded(store)
            await until_dispatched(store)
            await store.flush()
            await store.uploads._upload_object(force=True)
        left = objects.copy()
    return Bucket(left, disk, store.bucket.prefix)


async def entries_of(bucket: Bucket) -> Entries:
    found = await read_entries(bucket, "C1", "broker-a", lambda: None)
    assert found is not None
    return found


@pytest.mark.parametrize("harm", ["", "damaged", "gone"])
async def test_upload_objects_behind_the_root(harm: str) -> None:
    bucket = await behind_the_root(Objects())
    objects = bucket._store
    assert isinstance(objects, Objects)
    name = objects.named("/log/")[1]
    if harm == "damaged":
        found = objects.read(name)
        objects.replace(name, found.data[:-1] + b"?", found.version)
    elif harm:

        def gone(call: str, of: str, done: bool) -> None:
            if call == "read_range" and of == name and not done:
                raise FileNotFoundError(of)

        objects.fail = gone
    entries = await entries_of(bucket)
    if not harm:
        assert (len(entries.entries), len(entries.chain), entries.lost) == (3, 2, [])
        return
    assert len(entries.entries) == 1
    (why,) = entries.lost
    assert name.removeprefix(bucket.prefix) in why
    assert ("cannot be found" if harm == "damaged" else "has gone") in why
