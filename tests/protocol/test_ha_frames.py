"""The frames between master and slave, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.ha_frames import (
    HEADER,
    MAX_TRANSFER,
    HAFrameError,
    Piece,
    ReportDecoder,
    TransferDecoder,
    encode_header,
    encode_report,
)

OFFSETS = st.integers(0, 2**63 - 1)
FRAMES = st.lists(st.tuples(st.integers(0, 2**60), st.binary(max_size=50)), max_size=6)
CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=50)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """``data`` in pieces of these sizes, again and again."""
    pieces, at, number = [], 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
        number += 1
    return pieces


@given(reports=st.lists(OFFSETS, max_size=8), sizes=CUTS)
def test_reports_arrive_whole(reports: list[int], sizes: list[int]) -> None:
    decoder = ReportDecoder()
    data = b"".join(map(encode_report, reports))
    assert [offset for piece in cut(data, sizes) for offset in decoder.feed(piece)] == reports


@given(frames=FRAMES, sizes=CUTS)
def test_the_bytes_of_transfers_arrive_with_their_offsets(frames: list[tuple[int, bytes]], sizes: list[int]) -> None:
    decoder = TransferDecoder()
    data = b"".join(encode_header(offset, len(body)) + body for offset, body in frames)
    found: list[tuple[int, bytes]] = []
    for piece in cut(data, sizes):
        found += [(got.offset, bytes(got.data)) for got in decoder.feed(piece)]
    expected = []
    for offset, body in frames:
        # Byte by byte, since pieces may be of any size; a heartbeat is one piece without bytes.
        expected += [(offset + at, body[at : at + 1]) for at in range(len(body))] or [(offset, b"")]
    single = []
    for offset, body in found:
        single += [(offset + at, body[at : at + 1]) for at in range(len(body))] or [(offset, b"")]
    assert single == expected


def test_the_layout() -> None:
    assert encode_report(1) == bytes.fromhex("0000000000000001")
    assert encode_header(258, 3) == bytes.fromhex("0000000000000102 00000003")
    assert list(TransferDecoder().feed(encode_header(7, 0))) == [Piece(7, b"")]


@pytest.mark.parametrize(("offset", "size"), [(-1, 5), (5, -1), (5, MAX_TRANSFER + 1)])
def test_what_no_master_sends_is_an_error(offset: int, size: int) -> None:
    with pytest.raises(HAFrameError, match=f"a master sends {size} bytes from the offset {offset}"):
        list(TransferDecoder().feed(HEADER.pack(offset, size)))


def test_what_no_slave_reports_is_an_error() -> None:
    with pytest.raises(HAFrameError, match="reports the offset -1"):
        ReportDecoder().feed(encode_report(5) + encode_report(-1))
