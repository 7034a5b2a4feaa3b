"""A bucket that is damaged, forbidden or gone: errors that say what to do, without any key."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")


from tests.interop.harness.object_server import ObjectServer
from tests.spark.buckets import BROKER, Place, damaged, join, new_place, parsed, rows, run
from tests.spark.test_store_bucket_core import COUNT, HOURS, log_rows, small_joins, write
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.pipeline.store.bucket import BucketError, BucketReader, ObjectGoneError
from trimq.pipeline.store.files import StorePathError
from trimq.pipeline.store.options import parse
from trimq.pipeline.store.plan import plan_of
from trimq.pipeline.store.table import batches
from trimq.protocol.bucket_object import HEADER_SIZE

pytestmark = pytest.mark.one_pyspark
__all__ = ["small_joins"]


@pytest.fixture
def place(object_server: ObjectServer, tmp_path: Path) -> Place:
    return new_place(object_server, tmp_path)


def test_an_object_that_goes_while_a_table_is_read(place: Place, small_joins: None) -> None:
    """The text says what to do; an object that is missing although the manifest names it is damage."""
    run(place, write)
    planned = parsed(place)
    parts = plan_of(planned).parts

    async def script(store: BucketMessageStore) -> None:
        assert await join(store)

    run(place, script)
    with pytest.raises(ObjectGoneError, match=r"log/0+-\d+ is not in the bucket any more.*tieredStoreBucketGraceTime"):
        [list(batches(None, part, planned)) for part in parts]
    gone = next((place.objects / "segments").iterdir())
    gone.unlink()
    with pytest.raises(BucketError, match=r"segments/.* is damaged: it is missing, although the manifest names it"):
        rows(place)
    (damage,) = damaged(place)
    assert damage.file.endswith(gone.name)
    assert damage.why == "it is missing, although the manifest names it"
    assert pickle.loads(pickle.dumps(ObjectGoneError("a"))).name == "a"


def harm(path: Path, at: int) -> None:
    """Change a byte of an object, whose attributes stay."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_block_has_no_rows_and_is_in_the_table_of_damage(place: Place) -> None:
    run(place, write)
    expected = log_rows(place)
    harmed = sorted((place.objects / "log").iterdir())[2]
    harm(harmed, HEADER_SIZE + 20)
    found = rows(place)
    missing = [row for row in expected if row not in found]
    assert 0 < len(missing) < 30
    assert len({(row["topic"], row["queueId"]) for row in missing}) == 1
    (damage,) = damaged(place)
    assert damage.file.endswith(f"log/{harmed.name}")
    assert damage.why.endswith("the checksum of the block is wrong")
    assert damage.phy == min(row["commitLogOffset"] for row in missing)
    # Without the check only what is not a record at all is left out: the unit has another log offset.
    assert len(rows(place, checkCrc="false")) >= len(expected) - 1


def test_units_that_do_not_fit(place: Place) -> None:
    run(place, write)
    harm(sorted((place.objects / "log").iterdir())[2], HEADER_SIZE + 8 + 3)  # the size of the first record
    assert len(rows(place, checkCrc="false")) < 3 * HOURS * COUNT
    assert [damage.why.rpartition(": ")[2] for damage in damaged(place, checkCrc="false")] == [
        "the units of the block do not fit its records"
    ]


def test_a_damaged_directory_is_an_error_unless_damage_is_asked_for(place: Place) -> None:
    run(place, write)
    harmed = sorted((place.objects / "log").iterdir())[2]
    harm(harmed, harmed.stat().st_size - 60)
    with pytest.raises(BucketError, match=rf"log/{harmed.name} in the bucket is damaged: the directory"):
        rows(place)
    (damage,) = damaged(place)
    assert damage.file.endswith(f"log/{harmed.name}")
    assert damage.length > 0


def test_a_manifest_that_cannot_be_read(place: Place) -> None:
    with pytest.raises(StorePathError, match=r"s3://.* has no broker of cluster C1: nothing is in prod/mq/C1"):
        rows(place)
    run(place, write)
    with pytest.raises(StorePathError, match=r"no tier of broker no in cluster C1: there is no prod/mq/C1/no/manifest"):
        rows(place, broker="no")
    other = place.objects.parent / "other"
    shutil.copytree(place.objects, other)
    with pytest.raises(BucketError, match="is that of broker broker-a in cluster C1"):
        rows(place, broker="other")
    shutil.rmtree(other)
    page = max((place.objects / "manifest").glob("page-*"))
    harm(page, 40)
    with pytest.raises(BucketError, match=rf"manifest/{page.name} in the bucket: the manifest page is damaged"):
        rows(place)
    page.unlink()
    with pytest.raises(BucketError, match=r"the manifest names what is not there: .*manifest/page"):
        rows(place)
    harm(place.objects / "manifest/root", 5)
    with pytest.raises(BucketError, match=r"manifest/root in the bucket: the root of the manifest is damaged"):
        rows(place)


def test_no_text_has_a_key(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run(place, write)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    plan = plan_of(parsed(place))
    assert secret.encode() not in pickle.dumps((plan, parsed(place)))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(
        BucketError, match=r"refuses access to .* HTTP status 403 SignatureDoesNotMatch.*environment"
    ) as error:
        rows(place, broker=BROKER)
    assert error.value.__cause__ is None
    assert "wrong-secret" not in str(error.value)
    assert os.environ["AWS_ACCESS_KEY_ID"] not in str(error.value).replace(place.bucket, "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    place.server.delete_bucket(place.bucket)
    with pytest.raises(BucketError, match="the bucket does not exist"):
        rows(place, broker=BROKER)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    options = parse({"path": "s3://b/p", "cluster": "C"})
    assert options.bucket is not None
    with pytest.raises(BucketError, match=r"needs the package obstore.*pip install 'trimq\[spark,s3\]'"):
        BucketReader(options.bucket)
