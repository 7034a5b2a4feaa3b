"""The frames between master and slave in controller mode, cut anywhere."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.test_ha_frames import CUTS, cut
from trimq.protocol.auto_switch_frames import (
    EpochPiece,
    Hello,
    MasterDecoder,
    MasterEpochs,
    Report,
    SlaveDecoder,
    encode_epochs,
    encode_header,
    encode_hello,
    encode_report,
)
from trimq.protocol.epoch_file import Epoch
from trimq.protocol.ha_frames import MAX_TRANSFER, HAFrameError

OFFSETS = st.integers(0, 2**60)
IDS = st.integers(0, 2**63 - 1)
EPOCHS = st.builds(Epoch, st.integers(0, 2**31 - 1), OFFSETS)
LISTS = st.lists(st.tuples(st.integers(0, 2**31 - 1), OFFSETS), max_size=30).map(
    lambda pairs: [
        Epoch(*pair) for pair in zip(sorted({a for a, _ in pairs}), sorted(b for _, b in pairs), strict=False)
    ]
)
FRAMES = st.lists(st.tuples(OFFSETS, st.binary(max_size=50), EPOCHS, OFFSETS), max_size=6)


@given(hello=st.builds(Hello, IDS, st.booleans(), st.booleans()), reports=st.lists(OFFSETS, max_size=8), sizes=CUTS)
def test_what_a_slave_sends_arrives_whole(hello: Hello, reports: list[int], sizes: list[int]) -> None:
    data = 2 * encode_hello(hello) + b"".join(map(encode_report, reports))
    decoder = SlaveDecoder()
    found = [message for piece in cut(data, sizes) for message in decoder.feed(piece)]
    assert found == [hello, hello, *map(Report, reports)]


@given(entries=LISTS, log_end=OFFSETS, frames=FRAMES, sizes=CUTS)
def test_what_a_master_sends_arrives_with_its_epochs_and_offsets(
    entries: list[Epoch], log_end: int, frames: list[tuple[int, bytes, Epoch, int]], sizes: list[int]
) -> None:
    epochs = MasterEpochs(log_end, entries[-1].number if entries else -1, entries)
    data = encode_epochs(epochs)
    expected: list[tuple[object, ...]] = []
    for offset, body, epoch, confirm in frames:
        data += encode_header(offset, len(body), epoch, confirm) + body
        head = (*epoch, confirm, offset + len(body))
        expected += [(offset + at, body[at : at + 1], *head) for at in range(len(body))] or [(offset, b"", *head)]
    decoder = MasterDecoder()
    found = [message for piece in cut(data, sizes) for message in decoder.feed(piece)]
    assert found[0] == epochs
    single: list[tuple[object, ...]] = []
    for piece in found[1:]:
        assert isinstance(piece, EpochPiece)
        body = bytes(piece.data)
        # Byte by byte, since pieces may be of any size; a sign of life is one piece without bytes.
        single += [(piece.offset + at, body[at : at + 1], *piece[2:]) for at in range(len(body))] or [
            (piece.offset, b"", *piece[2:])
        ]
    assert single == expected


def test_the_layout() -> None:
    assert encode_hello(Hello(2)) == bytes.fromhex("00000001 0000 0000 0000000000000002")
    assert encode_hello(Hello(3, learner=True)) == bytes.fromhex("00000001 0000 0001 0000000000000003")
    assert encode_hello(Hello(3, last_file=True)) == bytes.fromhex("00000001 0001 0000 0000000000000003")
    assert encode_report(258) == bytes.fromhex("00000002 0000000000000102")
    epochs = MasterEpochs(4260, 1, [Epoch(1, 0)])
    assert encode_epochs(epochs) == bytes.fromhex(
        "00000001 0000000c 00000000000010a4 00000001 00000001 0000000000000000"
    )
    header = encode_header(4260, 3, Epoch(2, 4256), 4200)
    assert header == bytes.fromhex("00000002 00000003 00000000000010a4 00000002 00000000000010a0 0000000000001068")
    decoder = MasterDecoder()
    found = list(decoder.feed(encode_epochs(epochs) + header + b"abc"))
    assert found == [epochs, EpochPiece(4260, b"abc", 2, 4256, 4200, 4263)]


def test_a_master_of_rocketmq_without_a_log_sends_signs_of_life_from_minus_one() -> None:
    decoder = MasterDecoder()
    list(decoder.feed(encode_epochs(MasterEpochs(0, 1, [Epoch(1, 0)]))))
    (piece,) = decoder.feed(encode_header(-1, 0, Epoch(1, 0), -1))
    assert piece == EpochPiece(-1, b"", 1, 0, -1, -1)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (struct.pack(">ihhq", 1, 0, 0, -1), "broker id -1"),
        (struct.pack(">iq", 2, -1), "reports the offset -1"),
        (struct.pack(">iq", 3, 0), "state 3"),
        (encode_report(0) + encode_hello(Hello(2)), "state 1"),
    ],
)
def test_what_no_slave_sends(data: bytes, error: str) -> None:
    with pytest.raises(HAFrameError, match=error):
        SlaveDecoder().feed(data)


EMPTY = encode_epochs(MasterEpochs(0, -1, []))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (struct.pack(">iiqi", 2, 0, 0, 0), "state 2 and 0 bytes of epochs"),
        (struct.pack(">iiqi", 1, 13, 0, 0), "13 bytes of epochs"),
        (struct.pack(">iiqi", 1, -12, 0, 0), "-12 bytes of epochs"),
        (struct.pack(">iiqi", 1, 12 * 1001, 0, 0), "12012 bytes of epochs"),
        (struct.pack(">iiqi", 1, 0, -1, 0), "a log up to -1"),
        (encode_epochs(MasterEpochs(9, 2, [Epoch(2, 0), Epoch(1, 5)])), "epoch 1 from 5 on follows epoch 2"),
        (EMPTY + EMPTY + bytes(16), "a message with the state 1"),
        (EMPTY + encode_header(-1, 5, Epoch(1, 0), 0), "5 bytes from the offset -1"),
        (EMPTY + encode_header(-2, 0, Epoch(1, 0), 0), "0 bytes from the offset -2"),
        (EMPTY + encode_header(0, -1, Epoch(1, 0), 0), "-1 bytes"),
        (EMPTY + encode_header(0, MAX_TRANSFER + 1, Epoch(1, 0), 0), f"{MAX_TRANSFER + 1} bytes"),
        (EMPTY + encode_header(0, 0, Epoch(1, 0), -2), "confirmed up to -2"),
        (EMPTY + encode_header(0, 0, Epoch(-1, 0), 0), "epoch -1 from 0 on is out of range"),
        (EMPTY + encode_header(0, 0, Epoch(1, -1), 0), "epoch 1 from -1 on is out of range"),
    ],
)
def test_what_no_master_sends(data: bytes, error: str) -> None:
    with pytest.raises(HAFrameError, match=error):
        list(MasterDecoder().feed(data))
