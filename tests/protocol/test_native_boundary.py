"""The native extension's boundary: a mistake in it is a NativeFault, and each call releases its buffers."""

import mmap
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from tests.protocol.test_native_twins import HOSTS, NEXT, NO_LIMITS, NOTHING_PENDING, PHYSICAL, STORED_AT, make_reader
from trimq.protocol.batch import encode_batch
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.index_layout import file_size
from trimq.protocol.native import NATIVE, Messages
from trimq.protocol.record import MAGIC_V1, encode_record

ROOT: Final = Path(__file__).resolve().parents[2]
BODY: Final = encode_batch([(0, b"b" * size, b"UNIQ_KEY\x01A\x02TAGS\x01a\x02") for size in (10, 400)])
FIELDS: Final = {"a": "P", "b": "Orders", "c": "T", "d": "4", "e": "1", "f": "0", "g": "1", "h": "0", "j": "0"}
FRAME: Final = encode(RemotingCommand(310, 7, ext=FIELDS | {"i": "UNIQ_KEY\x01A\x02"}, body=b"body"))

FUNCTION: Final = re.compile(r"^ *(?:pub )?fn (\w+)[^{]*\{\n(.*?)(?=^ *(?:pub )?fn |\Z)", re.DOTALL | re.MULTILINE)
native = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")


def calls(text: str) -> Iterator[tuple[str, str]]:
    """Name and body of each function that Python calls in a source of the binding."""
    blocks = re.findall(r"^#\[pymethods\]\nimpl \w+ \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^#\[pyfunction\]\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield from FUNCTION.findall(block)


def test_each_call_does_its_work_in_guarded() -> None:
    """A panic outside of the guard would be a PanicException, which ``except Exception`` does not catch."""
    found = {
        name: body
        for source in (ROOT / "native/binding/src").glob("*.rs")
        for name, body in calls(source.read_text(encoding="utf-8"))
    }
    assert {
        "new",
        "read",
        "send",
        "batch",
        "write",
        "replies",
        "split",
        "flat",
        "put_entries",
        "are_messages",
        "tier_batch",
        "tier_records",
        "put_tier_items",
        "panic",
    } <= set(found)
    assert len(found) >= 24
    for name, body in found.items():
        assert body.lstrip().startswith("guarded(|| "), name


@native
def test_a_panic_is_an_exception_like_others() -> None:
    assert NATIVE.extension is not None
    with pytest.raises(NATIVE.extension.NativeFault, match="asked for"):
        NATIVE.extension.panic()
    assert issubclass(NATIVE.extension.NativeFault, Exception)
    assert NATIVE.fault is NATIVE.extension.NativeFault


def a_batch() -> Messages:
    found: Messages | None = make_reader().batch(BODY, "Orders", 6, (0, 0, 0), HOSTS[0], NO_LIMITS)
    assert found is not None
    return found


@native
@pytest.mark.parametrize(
    "change",
    [
        {"starts": []},
        {"starts": [NEXT, NEXT]},
        {"source": BODY[:40]},
        {"at": 1},
        {"at": (1 << 63) - 1},
        {"space": -1},
    ],
)
def test_what_cannot_be_written_is_a_fault_of_the_extension_s(change: dict[str, Any]) -> None:
    """Only sends that were read are written, so a mismatch is a fault of the extension; Python is used instead."""
    messages = a_batch()
    space = bytearray(messages.total + change.get("space", 0))
    with pytest.raises(NATIVE.fault):
        messages.write(
            change.get("source", BODY),
            memoryview(space),
            change.get("at", 0),
            PHYSICAL,
            STORED_AT,
            change.get("starts", [NEXT]),
        )


Kind = Literal["i", "q"]


def row(kind: Kind, *numbers: int) -> memoryview:
    return memoryview(bytearray(struct.pack(f"={len(numbers)}{kind}", *numbers))).cast("B").cast(kind)


@native
def test_entries_that_do_not_fit_are_a_fault_of_the_extension_s() -> None:
    assert NATIVE.extension is not None
    file = memoryview(bytearray(file_size(2, 3)))
    with pytest.raises(NATIVE.fault, match="do not fit"):
        NATIVE.extension.put_entries(file, 2, 3, row("i", 1), row("q", 2), row("i", 3))
    with pytest.raises(NATIVE.fault, match="different lengths"):
        NATIVE.extension.put_entries(file, 2, 1, row("i", 1, 2), row("q", 2), row("i", 3))


@native
@pytest.mark.parametrize("shared", ["hashes", "physical", "seconds"])
def test_nothing_is_written_over_what_it_is_made_of(shared: str) -> None:
    assert NATIVE.extension is not None
    messages = a_batch()
    memory = bytearray(len(BODY) + messages.total)
    memory[: len(BODY)] = BODY
    view = memoryview(memory)
    with pytest.raises(ValueError, match="overlaps a buffer to read"):
        messages.write(view[: len(BODY)], view[len(BODY) - 1 :], 0, PHYSICAL, STORED_AT, [NEXT])
    assert memory == BODY + bytes(messages.total)
    messages.write(view[: len(BODY)], view[len(BODY) :], 0, PHYSICAL, STORED_AT, [NEXT])

    file = memoryview(bytearray(-(-file_size(2, 3) // 8) * 8 + 8))  # its last eight bytes are aligned
    kinds: dict[str, Kind] = {"hashes": "i", "physical": "q", "seconds": "i"}
    columns = {name: row(kind, 1) for name, kind in kinds.items()}
    columns[shared] = file[-8:].cast(kinds[shared])[:1]
    with pytest.raises(ValueError, match="overlaps a buffer to read"):
        NATIVE.extension.put_entries(file, 2, 1, *columns.values())
    assert not any(file)
    NATIVE.extension.put_entries(file[:-8], 2, 1, *columns.values())
    assert any(file)


def a_record() -> bytes:
    host = bytes(8)
    return encode_record(
        topic=b"T",
        queue_id=0,
        queue_offset=0,
        physical_offset=0,
        body=b"b",
        properties=b"",
        sys_flag=0,
        flag=0,
        born_timestamp=0,
        born_host=host,
        store_timestamp=0,
        store_host=host,
        reconsume_times=0,
        prepared_transaction_offset=0,
    )


@native
def test_buffers_are_let_go_with_the_call() -> None:
    """A mapped file can be closed after a call, while the result of the call still exists."""
    extension = NATIVE.extension
    assert extension is not None
    kept: list[Any] = []

    def closed_after(data: bytes, call: Callable[[memoryview], object]) -> None:
        with mmap.mmap(-1, len(data)) as file:
            file[:] = data
            with memoryview(file) as view:
                kept.append(call(view))
        assert file.closed

    reader = make_reader()
    spans = [(0, len(FRAME), 1)]
    closed_after(FRAME, lambda view: reader.read(view, [310], spans, [HOSTS[0]], (1, 1), NO_LIMITS, NOTHING_PENDING))
    assert len(kept[-1]) == 1
    frames, of_frame = memoryview(FRAME), ([310], spans, [HOSTS[0]], (1, 1), NO_LIMITS)
    closed_after(b"log", lambda view: reader.read(frames, *of_frame, (0, view, 0, bytearray())))
    closed_after(b"states", lambda view: reader.read(frames, *of_frame, (0, memoryview(b""), 0, view)))
    states = bytearray(b"states")
    kept.append(reader.read(frames, *of_frame, (0, memoryview(b""), 0, states)))
    states.extend(b"more")  # the table of halves grows
    closed_after(FRAME, lambda view: reader.send(view, [310]))
    closed_after(BODY, lambda view: reader.batch(view, "Orders", 6, (0, 0, 0), HOSTS[0], NO_LIMITS))
    messages = kept[-1]
    closed_after(BODY, lambda view: messages.write(view, memoryview(bytearray(messages.total)), 0, 0, 0, [0]))
    closed_after(bytes(messages.total), lambda view: messages.write(BODY, view, 0, 0, 0, [0]))
    closed_after(struct.pack("=q", 5), lambda view: extension.seconds(view.cast("q"), 1))
    closed_after(a_record(), lambda view: extension.log_check(view, 0, 1000))
    closed_after(a_record(), lambda view: extension.log_rows(view, 0, True, ["Other"]))
    assert [len(made) for made in kept[-1][2:5]] == [1, 1, 20]
    columns = row("i", 1), row("q", 2), row("i", 3)
    closed_after(bytes(file_size(2, 3)), lambda view: extension.put_entries(view, 2, 1, *columns))
    unit = messages.units()[:20]
    records = bytes(messages.total)
    closed_after(records, lambda view: extension.are_messages(view, 0, unit, 0, (6, 0, b"\x06Orders")))
    logged = a_record()
    one = struct.pack(">qiq", 0, len(logged), 1)
    target = memoryview(bytearray(len(logged)))
    queue = "T", 1, 2
    closed_after(logged, lambda view: extension.tier_batch(view, 0, one, 0, target, queue))
    closed_after(bytes(len(logged)), lambda view: extension.tier_batch(memoryview(logged), 0, one, 0, view, queue))
    closed_after(logged, lambda view: extension.tier_records(view, 0, one, bytes(16), 0, (0, MAGIC_V1, b"\x01T"), 0))
    item, time = bytes(32), row("q", 2)
    closed_after(bytes(1000), lambda view: extension.put_tier_items(view, 2, 1, item, 0, time))
    closed_after(item, lambda view: extension.put_tier_items(memoryview(bytearray(1000)), 2, 1, view, 0, time))
    assert None not in kept
