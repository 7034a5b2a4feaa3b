"""The receive buffer yields the same frames as the stream decoder, however the bytes are split."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import FrameDecoder, encode
from trimq.protocol.frame_buffer import FrameBuffer


def feed(buffer: FrameBuffer, data: bytes) -> list[RemotingCommand]:
    """Fill the buffer as a socket would: as many bytes as fit at a time."""
    found = []
    while data:
        space = buffer.space()
        assert len(space)
        part = data[: len(space)]
        space[: len(part)] = part
        found += buffer.received(len(part))
        data = data[len(part) :]
    return found


def seen(commands: list[RemotingCommand]) -> list[tuple[int, dict[str, str], bytes]]:
    return [(command.opaque, command.ext_fields(), bytes(command.body)) for command in commands]


@given(
    st.lists(st.sampled_from([0, 1, 40, 5_000, 33_000, 70_000, 300_000]), max_size=12),
    st.sampled_from([7, 1_000, 50_000, 400_000]),
    st.randoms(),
)
def test_frames_come_out_as_they_went_in(sizes: list[int], most: int, chance: random.Random) -> None:
    stream = b""
    for number, size in enumerate(sizes):
        command = RemotingCommand.request(11, {"n": str(number)}, bytes([number]) * size)
        command.opaque = number
        stream += encode(command)
    buffer, found, at = FrameBuffer(), [], 0
    least = max(1, min(most, len(stream) // 200))
    while at < len(stream):
        count = chance.randint(least, max(least, most))
        found += feed(buffer, stream[at : at + count])
        at += count
    # Compared at the end: bytes received later must not change the frames handed out.
    assert seen(found) == seen(FrameDecoder().feed(stream))
    assert buffer.pending == 0


def test_memory_grows_with_what_comes_not_with_what_is_announced() -> None:
    buffer = FrameBuffer()
    feed(buffer, (15 << 20).to_bytes(4, "big") + bytes(100))
    assert len(buffer.space()) <= 256 * 1024
    assert buffer.pending == 104


def test_after_a_long_frame_the_buffer_is_small_again() -> None:
    buffer = FrameBuffer()
    assert len(feed(buffer, encode(RemotingCommand.request(1, None, bytes(5 << 20))))) == 1
    assert len(buffer.space()) == 256 * 1024


@pytest.mark.parametrize("word", [0, 3, 16_777_213, 0x48545450])
def test_a_length_that_no_frame_has_is_refused(word: int) -> None:
    with pytest.raises(FrameError):
        feed(FrameBuffer(), word.to_bytes(4, "big") + bytes(8))
