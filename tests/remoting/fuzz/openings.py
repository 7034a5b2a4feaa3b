"""How a connection may begin, well or not, and what has to follow. All of it follows from one random generator."""

import random
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.remoting.harness import request
from trimq.protocol.command import Encoding
from trimq.protocol.frame import encode

MOST: Final = 1 << 20
"""Of a frame, in the reactors that are tested."""
CODES: Final = (1, 99)
FRAMES: Final = tuple(
    encode(request(code, body, encoding=encoding, opaque=7))
    for code in CODES
    for body in (b"", b"x", bytes(3000))
    for encoding in (Encoding.JSON, Encoding.ROCKETMQ)
)
"""Each is served."""
V1: Final = (
    b"PROXY TCP4 10.1.2.3 10.0.0.1 4711 10911\r\n",
    b"PROXY TCP6 2001:db8::1 ::1 1 2\r\n",
    b"PROXY UNKNOWN x\r\n",
)
_V2: Final = b"\r\n\r\n\x00\r\nQUIT\n"
V2: Final = (
    _V2 + b"\x21\x11\x00\x0c\x0a\x01\x02\x03\x0a\x00\x00\x01\x12\x67\x2a\x9f",
    _V2 + b"\x20\x00\x00\x00",
    _V2 + b"\x21\x11\x00\x10\x0a\x01\x02\x03\x0a\x00\x00\x01\x12\x67\x2a\x9f\x04\x00\x01x",
)
FOREIGN: Final = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /x HTTP/1.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"SSH-2.0-OpenSSH_9\r\n",
    b"\x15\x03\x01\x00\x02\x02\x28",
    b"\x80\x2e\x01\x03\x01",
)


@dataclass
class Opening:
    """The bytes of a client, in pieces. ``is_mutated``: the preamble is none that is known to be right.

    ``ends``: after the last piece the client closes the connection, or resets it; ``at_once``: before the server has
    read that piece. ``client``: it is a real TLS client,
    after the preamble in ``pieces``, and sends one frame.
    """

    preamble: bytes
    is_mutated: bool
    rest: bytes
    genuine: bytes = b""
    client: bool = False
    ends: str = ""
    at_once: bool = False
    pieces: list[bytes] = field(default_factory=list)

    @property
    def given(self) -> bytes:
        """All bytes of its pieces."""
        return b"".join(self.pieces)


class Foreseen(NamedTuple):
    """What has to follow; None: it may or may not. ``least``, ``most``: frames that are served."""

    closed: bool | None
    shakes_hands: bool | None
    least: int = 0
    most: int = 0


class Openings:
    """Makes openings. ``hellos``: what real clients begin with, for each version of TLS."""

    def __init__(self, source: random.Random, hellos: list[bytes]) -> None:
        self._source = source
        self._hellos = hellos

    def next(self, *, behind_proxy: bool) -> Opening:
        """The next one; behind a proxy most have a preamble."""
        source = self._source
        preamble, is_mutated = b"", False
        if source.random() < (0.7 if behind_proxy else 0.1):
            preamble = source.choice(V1 + V2)
            if source.random() < 0.3:
                is_mutated = True
                preamble = source.choice(
                    (self._changed(preamble), self._cut(preamble), preamble * 2, _V2 + source.randbytes(8))
                )
        if source.random() < 0.02:
            return Opening(preamble, is_mutated, b"", client=True, pieces=[preamble])
        rest, genuine = self._rest()
        made = Opening(preamble, is_mutated, rest, genuine)
        made.pieces = self._pieces(preamble + rest)
        end = source.random()
        if end < 0.25:
            made.ends = "end" if end < 0.2 else "reset"
            made.at_once = source.random() < 0.5
            made.pieces = made.pieces[: source.randrange(len(made.pieces) + 1)]
        return made

    def _rest(self) -> tuple[bytes, bytes]:
        """What is behind the preamble; and the ClientHello that it is, or is a part of."""
        source = self._source
        kind = source.randrange(14)
        if kind < 4:
            frames = b"".join(source.choices(FRAMES, k=source.randrange(1, 4)))
            return (frames if kind < 2 else self._cut(frames) if kind == 2 else self._changed(frames)), b""
        if kind == 4:
            return source.choice((0, 1, 3, 4, MOST - 4, MOST - 3, 1 << 31)).to_bytes(4, "big") + source.randbytes(
                20
            ), b""
        if kind < 7:
            foreign = source.choice(FOREIGN)
            return (foreign if kind == 5 else self._cut(foreign)), b""
        noise = source.randbytes(source.choice((0, 1, 3, 4, 5, 6, 100, 3000)))
        if kind == 7:
            return source.choice((noise, bytes(len(noise)), b"\x00\x00\x00\x08" + noise)), b""
        if kind == 8:
            return b"\x16" + noise, b""
        if kind == 9:
            return b"\x16\x03" + bytes([source.randrange(5)]) + len(noise).to_bytes(2, "big") + noise, b""
        hello = source.choice(self._hellos)
        if kind == 10:
            return (hello, hello) if source.random() < 0.3 else (self._changed(hello), b"")
        if kind == 11:
            return self._cut(hello), hello
        if kind == 12:
            return self._cut(hello) + noise, b""
        return hello + source.choice((hello, noise, FRAMES[0])), b""

    def _cut(self, data: bytes) -> bytes:
        return data[: self._source.randrange(len(data) + 1)]

    def _changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._source.randrange(1, 4)):
            changed[self._source.randrange(len(changed))] = self._source.randrange(256)
        return bytes(changed)

    def _pieces(self, data: bytes) -> list[bytes]:
        source = self._source
        cuts = sorted(source.randrange(len(data) + 1) for _ in range(source.choice((0, 0, 1, 2, 3))))
        return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def foresee(opening: Opening, *, mode: str, certificate: bool, behind_proxy: bool) -> Foreseen:
    """What has to follow on the bytes that were given, by the facts."""
    given = opening.given
    if opening.ends == "reset":
        return Foreseen(closed=True, shakes_hands=False, most=3)  # what had arrived may be lost
    if behind_proxy and opening.preamble:
        if opening.is_mutated and given[:1] in (b"P", b"\r") and not _may_be_right(given):
            return Foreseen(True if opening.ends else None, shakes_hands=False)
        if opening.is_mutated:
            return Foreseen(True if opening.ends else None, False if opening.ends else None, most=3)
        if len(given) < len(opening.preamble):
            return Foreseen(closed=bool(opening.ends), shakes_hands=False)
        given = given[len(opening.preamble) :]
    elif behind_proxy and given[:1] in (V1[0][:1], _V2[:1]):
        # It begins as a preamble, or all of it that arrived first did.
        return Foreseen(True if opening.ends else None, shakes_hands=False)
    found = _first(given, opening, mode=mode, certificate=certificate)
    return found._replace(closed=True, shakes_hands=False) if opening.ends else found


def _may_be_right(given: bytes) -> bool:
    """Whether there may be a preamble: the whole mark of version 1 and the end of a line, or that of version 2."""
    return (given.startswith(b"PROXY ") and b"\r\n" in given[:107]) or given.startswith(_V2)


def _first(given: bytes, opening: Opening, *, mode: str, certificate: bool) -> Foreseen:
    decides = mode == "enforcing" or (mode == "permissive" and certificate)
    if opening.client and given:  # a preamble from elsewhere, and what the client sends
        given += b"\x16\x03\x01"
    elif opening.client:
        if decides and certificate:
            return Foreseen(closed=False, shakes_hands=False, least=1, most=1)
        return Foreseen(closed=True, shakes_hands=False)
    if not given:
        return Foreseen(closed=False, shakes_hands=False)
    if not decides:
        return _plain(given)
    if given[0] != 0x16:
        return Foreseen(closed=True, shakes_hands=False) if mode == "enforcing" else _plain(given)
    if not certificate:
        return Foreseen(closed=True, shakes_hands=False)
    if given == opening.genuine[: len(given)]:
        return Foreseen(closed=False, shakes_hands=True)
    return Foreseen(closed=None, shakes_hands=None)  # it waits for more of the record, or is closed


def _plain(given: bytes) -> Foreseen:
    """Frames: those of FRAMES are served, of others it depends on their headers."""
    at = served = 0
    unknown = False
    while len(given) - at >= 4:
        length = int.from_bytes(given[at : at + 4], "big")
        if not 4 <= length <= MOST - 4:
            return Foreseen(closed=True, shakes_hands=False, least=0 if unknown else served, most=served)
        end = at + 4 + length
        if end > len(given):
            break
        unknown = unknown or given[at:end] not in FRAMES
        if unknown:
            return Foreseen(closed=None, shakes_hands=False, least=served, most=served + 10)
        served, at = served + 1, end
    return Foreseen(closed=False, shakes_hands=False, least=served, most=served)
