"""OutBuffer with a socket that accepts as many bytes as the test allows."""

import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.remoting.server.out_buffer import MAX_BUFFERS, OutBuffer


class NarrowSocket:
    """Accepts the next of ``space`` bytes in each call, then is full."""

    def __init__(self, space: Iterator[int]) -> None:
        self.space = space
        self.taken = bytearray()
        self.vectors: list[int] = []

    def send(self, data: bytes | memoryview) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: list[bytes | memoryview]) -> int:
        self.vectors.append(len(buffers))
        space = next(self.space, 0)
        if not space:
            raise BlockingIOError
        data = b"".join(buffers)[:space]
        self.taken += data
        return len(data)


def flush(out: OutBuffer, sock: NarrowSocket) -> bool:
    return out.flush(cast("socket.socket", sock))


def queue(out: OutBuffer, *chunks: bytes | memoryview) -> None:
    for chunk in chunks:
        out.chunks.append(chunk)
        out.queued += len(chunk)


SIZES = st.sampled_from([0, 1, 100, 5000, 8191, 8192, 20000, 40000])


@given(
    sizes=st.lists(st.tuples(SIZES, st.booleans()), max_size=30),
    spaces=st.lists(st.sampled_from([0, 1, 7, 8192, 30000, 100000])),
)
def test_all_bytes_leave_in_order_and_owners_hear_of_it_once_theirs_are_gone(
    sizes: list[tuple[int, bool]], spaces: list[int]
) -> None:
    out = OutBuffer()
    sock = NarrowSocket(iter(spaces))
    expected = bytearray()
    ends: list[int] = []
    released: list[int] = []
    for number, (size, owned) in enumerate(sizes):
        data = bytes([number % 256]) * size
        expected += data
        queue(out, memoryview(data) if owned else data)
        if owned:
            ends.append(len(expected))
            out.on_sent(partial(released.append, len(expected)))
        if number % 3 == 0:
            flush(out, sock)
            assert released == [end for end in ends if end <= len(sock.taken)]
    for _ in range(len(spaces)):
        flush(out, sock)
    sock.space = iter([10**9] * 100)
    assert flush(out, sock)
    assert sock.taken == expected
    assert released == ends
    assert out.queued == out.sent == len(expected)


def test_a_sendmsg_never_has_more_buffers_than_the_kernel_takes() -> None:
    out = OutBuffer()
    big = bytes(8192)
    for _ in range(3 * MAX_BUFFERS):
        queue(out, b"small", memoryview(big), b"er", b"")
    sock = NarrowSocket(iter([10**9] * 100))
    assert flush(out, sock)
    assert max(sock.vectors) <= MAX_BUFFERS
    assert len(sock.taken) == 3 * MAX_BUFFERS * (8192 + 7)


def test_small_neighbours_travel_as_one_buffer() -> None:
    out = OutBuffer()
    queue(out, *[b"x" * 100] * 1000)
    sock = NarrowSocket(iter([10**9]))
    assert flush(out, sock)
    assert sock.vectors == [1]


def test_no_view_is_left_when_its_owner_hears_of_it() -> None:
    memory = bytearray(100_000)
    out = OutBuffer()
    view = memoryview(memory)
    queue(out, b"head", view[:60_000], view[60_000:])
    view.release()
    sizes = []

    def release() -> None:
        memory.extend(b"resizing fails while there is a view")
        sizes.append(len(memory))

    out.on_sent(release)
    sock = NarrowSocket(iter([50_000, 0, 10**9]))
    assert not flush(out, sock)
    assert not sizes
    assert flush(out, sock)
    assert sizes == [100_036]


def test_discard_releases_everything_without_sending() -> None:
    out = OutBuffer()
    released = []
    queue(out, memoryview(bytes(10)))
    out.on_sent(lambda: released.append(1))
    out.discard()
    assert released == [1]
    assert not out.chunks


def test_an_error_of_the_socket_is_the_callers() -> None:
    class Broken(NarrowSocket):
        def send(self, data: bytes | memoryview) -> int:
            raise ConnectionResetError

    out = OutBuffer()
    queue(out, b"x")
    with pytest.raises(ConnectionResetError):
        flush(out, Broken(iter([])))


def test_a_release_that_fails_keeps_no_other_from_being_called() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    for ending in ("sent", "discarded"):
        out = OutBuffer()
        released: list[str] = []
        queue(out, b"x")
        out.on_sent(fail)
        out.on_sent(partial(released.append, ending))
        if ending == "sent":
            assert flush(out, NarrowSocket(iter([1])))
        else:
            out.discard()
        assert released == [ending]
