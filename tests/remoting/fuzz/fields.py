"""Random requests with mutated authentication fields, as frames. All of it follows from one random generator."""

import json
import random
import struct
from dataclasses import dataclass, field
from typing import Any, Final

from tests.remoting.fuzz.referee import digest_of, signed_text
from trimq.protocol.auth.stamp import stamp_text

NAMES: Final = {
    "root": "root canary-fuzz",
    "all": "all canary-fuzz",
    "app": "app canary-fuzz",
    "reader": "x",
    "off": "off",
}
SECRETS: Final = NAMES | {"Jürgen": "gehäim canary-fuzz", "strict": "strict canary-fuzz"}
"""What each user may do: see Referee."""

SENDER: Final = "AAAAAAAAAAAAAAAA"
SEND: Final = {"defaultTopicQueueNums": "4", "queueId": "0", "sysFlag": "0", "bornTimestamp": "1", "flag": "0"}
SEND_V2: Final = {"d": "4", "e": "0", "f": "0", "g": "1", "h": "0"}
PULL: Final = {"queueId": "0", "queueOffset": "0", "maxMsgNums": "1", "sysFlag": "0", "commitOffset": "0"}
PULL_TIMES: Final = {"suspendTimeoutMillis": "0", "subVersion": "0"}
CODES: Final = (310, 310, 310, 310, 10, 11, 30, 26, 3005, 7777)
TEXTS: Final = ("", "x", "true", "3", "é", "\N{SNOWMAN}", "\U0001f600", '"', "\\", "\x07", "a\x00b", "\uffff", "tmq1:")
ODD_TEXTS: Final = ("\ud800", "\udc00x", "x\ud83d", "\ude00")
"""Halves of pairs: only JSON with escapes can have them."""
FIELD_NAMES: Final = (
    "aa",
    "zz",
    "Zz",
    "SecurityToken",
    "_UNIQUE_KEY_QUERY",
    "é",
    "\ue000",
    "\U0001f600",
    "",
    "!",
    "!once",
    "%",
)
SIGNATURES: Final = ("", "x", "é" * 28, "A" * 28, "A" * 27 + "=", "=" * 28, "\ud800", "\x00" * 28)


@dataclass
class Request:
    """A request before it is encoded. ``pairs``: its ext fields, names may repeat. ``binary``: in RocketMQ's form."""

    code: int
    pairs: list[tuple[str, Any]]
    body: bytes
    version: int
    binary: bool
    ascii_only: bool
    extra: dict[str, Any] = field(default_factory=dict)

    def frame(self) -> bytes:
        """The frame, with its length."""
        head = self._binary_head() if self.binary else self._json_head()
        total = 4 + len(head) + len(self.body)
        return struct.pack(">II", total, self.binary << 24 | len(head)) + head + self.body

    def _json_head(self) -> bytes:
        ascii_only = self.ascii_only
        text = ",".join([f"{_json(name, ascii_only)}:{_json(value, ascii_only)}" for name, value in self.pairs])
        rest = "".join([f",{_json(name, True)}:{_json(value, True)}" for name, value in self.extra.items()])
        front = f'{{"code":{self.code},"extFields":{{{text}}},"flag":0,"language":"JAVA","opaque":7'
        return f'{front},"version":{self.version}{rest}}}'.encode("utf-8", "surrogatepass")

    def _binary_head(self) -> bytes:
        parts = []
        for name, value in self.pairs:
            key, text = _utf8(name), _utf8(value if isinstance(value, str) else json.dumps(value))
            parts += [struct.pack(">H", len(key)), key, struct.pack(">I", len(text)), text]
        ext = b"".join(parts)
        fixed = struct.pack(">HBhii", self.code & 0xFFFF, 0, self.version, 7, 0)
        return b"".join((fixed, struct.pack(">II", 0, len(ext)), ext))


def _json(value: Any, ascii_only: bool) -> str:
    return json.dumps(value, ensure_ascii=ascii_only)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Fields:
    """Makes requests. ``now``: the time for stamps in ms; ``recorded``: frames with stamps that were made before."""

    def __init__(self, source: random.Random, now: int) -> None:
        self.source = source
        self.now = now
        self.recorded: list[Request] = []
        self._number = 0
        self._attacks = (
            *(self._value, self._names, self._move, self._into_body, self._rename, self._body, self._code),
            *(self._signature, self._signature, self._user, self._user, self._drop, self._repeat, self._repeat),
            *(self._version, self._type, self._strip, self._add, self._escapes, self._header, self._many),
        )

    def frame(self) -> bytes:
        """The next one: a third are as they were signed, the others are changed after that, some of them as bytes."""
        source = self.source
        kind = source.random()
        if self.recorded and kind < 0.05:
            old = source.choice(self.recorded)
            request = Request(old.code, list(old.pairs), old.body, old.version, old.binary, old.ascii_only)
            if source.random() < 0.5:
                source.choice((self._code, self._strip, self._rename))(request)
            return request.frame()
        request = self._signed()
        if kind < 0.4:
            return request.frame()
        for _ in range(1 if kind < 0.8 else source.randrange(1, 4)):
            source.choice(self._attacks)(request)
        frame = request.frame()
        return frame if kind < 0.9 else self._bytes(frame)

    # signed requests

    def _signed(self) -> Request:
        source = self.source
        code = source.choice(CODES)
        fields: dict[str, str] = _named(
            code, *source.choice((("T", "G"), ("T", "G"), ("T", "H"), ("U", "G"), ("%RETRY%G", "G")))
        )
        binary = source.random() < 0.4
        version = source.choice((505, 505, 479, 394, 393, 0))
        ascii_only = source.random() < 0.5
        texts = TEXTS if binary or not ascii_only else TEXTS + ODD_TEXTS
        while source.random() < 0.3:
            fields[source.choice(FIELD_NAMES)] = source.choice(texts)
        name = source.choice(list(SECRETS))
        stamped = source.random() < (0.7 if name == "strict" else 0.15)
        if stamped:
            self._number += 1
            late = source.choice((0, 0, 0, 0, -400_000, 400_000))
            fields["!once"] = stamp_text(code, self.now + late, SENDER, self._number)
        fields["AccessKey"] = name
        body = source.choice((b"", b"x", b"hello", bytes(range(256))))
        secret = SECRETS[name] if source.random() < 0.85 else source.choice(("guess", "", *SECRETS.values()))
        unsigned = {"_UNIQUE_KEY_QUERY"} if version <= 393 else set()
        signed = signed_text({key: value for key, value in fields.items() if key not in unsigned}) + body
        fields["Signature"] = digest_of(secret, signed)
        pairs: list[tuple[str, Any]] = list(fields.items())
        if source.random() < 0.5:
            source.shuffle(pairs)
        request = Request(code, pairs, body, version, binary, ascii_only)
        if stamped:
            self.recorded.append(request)
            del self.recorded[:-50]
        return request

    # changes after that

    def _pick(self, request: Request) -> int:
        return self.source.randrange(len(request.pairs)) if request.pairs else -1

    def _set(self, request: Request, name: str, value: Any) -> None:
        request.pairs = [(key, value if key == name else old) for key, old in request.pairs]

    def _get(self, request: Request, name: str) -> str:
        return next((value for key, value in request.pairs if key == name and isinstance(value, str)), "")

    def _value(self, request: Request) -> None:
        if (at := self._pick(request)) >= 0:
            name, value = request.pairs[at]
            request.pairs[at] = (name, f"{value}x" if self.source.random() < 0.5 else self.source.choice(TEXTS))

    def _names(self, request: Request) -> None:
        """Swap two values."""
        one, other = self._pick(request), self._pick(request)
        if one >= 0:
            pairs = request.pairs
            (a, x), (b, y) = pairs[one], pairs[other]
            if one != other:
                pairs[one], pairs[other] = (a, y), (b, x)

    def _move(self, request: Request) -> None:
        """Move the end of a value to the beginning of the next one: what is signed stays the same."""
        order = sorted(key for key, value in request.pairs if key != "Signature" and isinstance(value, str))
        if len(order) >= 2:
            at = self.source.randrange(len(order) - 1)
            first, second = self._get(request, order[at]), self._get(request, order[at + 1])
            cut = self.source.randrange(len(first) + 1)
            self._set(request, order[at], first[:cut])
            self._set(request, order[at + 1], first[cut:] + second)

    def _into_body(self, request: Request) -> None:
        """Move the last value into the body, or the other way round."""
        order = sorted(key for key, _ in request.pairs if key != "Signature")
        if not order:
            return
        last = self._get(request, order[-1])
        if self.source.random() < 0.7:
            self._set(request, order[-1], "")
            request.body = last.encode("utf-8", "replace") + request.body
        else:
            self._set(request, order[-1], last + request.body.decode("latin-1"))
            request.body = b""

    def _rename(self, request: Request) -> None:
        if (at := self._pick(request)) >= 0:
            name, value = request.pairs[at]
            request.pairs[at] = (self.source.choice((f"{name}a", name.upper(), name[:-1], "zz", "!")), value)

    def _body(self, request: Request) -> None:
        body, source = request.body, self.source
        request.body = source.choice((body + b"y", body[:-1], b"", bytes(reversed(body)), b"z" * 5000))

    def _code(self, request: Request) -> None:
        request.code = self.source.choice((*CODES, 35, 3003, 25))

    def _signature(self, request: Request) -> None:
        old = self._get(request, "Signature")
        source = self.source
        at = source.randrange(len(old)) if old else 0
        changed = old[:at] + source.choice("Aa+/=-_ é") + old[at + 1 :]
        others = (old[:-1], old + "=", old + "\n", " " + old, old.lower(), old.replace("=", ""), old * 2, "B" * 5000)
        value = source.choice(
            (changed, changed, source.choice(others), source.choice(SIGNATURES), None, 5, [old], True)
        )
        self._set(request, "Signature", value)

    def _user(self, request: Request) -> None:
        old = self._get(request, "AccessKey")
        names: tuple[Any, ...] = (
            *SECRETS,
            "unknown",
            "",
            old.upper(),
            old + " ",
            "\x00" + old,
            "ü" * 100,
            "n" * 5000,
            None,
            7,
            {},
            "\ud800",
        )
        self._set(request, "AccessKey", self.source.choice(names))

    def _drop(self, request: Request) -> None:
        name = self.source.choice(("AccessKey", "Signature", "!once", *(key for key, _ in request.pairs)))
        request.pairs = [(key, value) for key, value in request.pairs if key != name]

    def _repeat(self, request: Request) -> None:
        """The same name twice, with the same or another value, before or behind it."""
        if (at := self._pick(request)) >= 0:
            name, value = request.pairs[at]
            if self.source.random() < 0.5:
                name, value = self.source.choice(
                    (("AccessKey", "root"), ("Signature", "x"), ("b", "T"), ("topic", "U"))
                )
            more = value if self.source.random() < 0.4 else self.source.choice(("x", "", None, *SECRETS))
            request.pairs.insert(self.source.randrange(len(request.pairs) + 1), (name, more))

    def _version(self, request: Request) -> None:
        request.version = self.source.choice((0, 392, 393, 394, 505, -1))

    def _type(self, request: Request) -> None:
        """A number, boolean, null or list for text: number and boolean are signed as their text."""
        if (at := self._pick(request)) >= 0:
            name, value = request.pairs[at]
            if isinstance(value, str) and value.isascii() and value.isdigit() and value[0] != "0":
                request.pairs[at] = (name, int(value))
            else:
                odd = True if value == "true" else self.source.choice((None, True, 1, 1.5, [value], {"a": value}))
                request.pairs[at] = (name, odd)

    def _strip(self, request: Request) -> None:
        """Take the stamp off: the field, or its name."""
        other = self.source.choice(("", "zz", "!", "aa"))
        request.pairs = [
            (other if key == "!once" else key, value) for key, value in request.pairs if other or key != "!once"
        ]

    def _add(self, request: Request) -> None:
        request.pairs.append((self.source.choice(FIELD_NAMES), self.source.choice(("", *TEXTS))))

    def _escapes(self, request: Request) -> None:
        request.ascii_only = not request.ascii_only

    def _header(self, request: Request) -> None:
        """Fields of the header a second time."""
        name = self.source.choice(
            ("version", "code", "extFields", "~ext", "~encoding", "~head", "serializeTypeCurrentRPC")
        )
        request.extra[name] = self.source.choice((310, "310", 393, {}, {"AccessKey": "root"}, None, "JSON"))

    def _many(self, request: Request) -> None:
        """Very many or very long fields, more than are looked at: rarely, since they are slow to make."""
        kind = self.source.randrange(40)
        if kind == 0:
            request.pairs += [(f"f{number}", "") for number in range(1100)]
        elif kind == 1:
            request.pairs.append(("aaa", "x" * 300_000))
        elif kind < 8:
            request.pairs += [(f"f{number}", "") for number in range(self.source.choice((50, 70)))]

    def _bytes(self, frame: bytes) -> bytes:
        """Change some bytes behind the lengths, or cut the end; the lengths are right again."""
        changed = bytearray(frame)
        for _ in range(self.source.randrange(1, 4)):
            changed[self.source.randrange(8, len(changed))] = self.source.randrange(256)
        return bytes(changed)


def _named(code: int, topic: str, group: str) -> dict[str, str]:
    """The ext fields of a request that is complete."""
    if code == 310:
        return {"a": "P", "b": topic, "c": "TBW102", **SEND_V2}
    if code == 10:
        return {"producerGroup": "P", "topic": topic, "defaultTopic": "TBW102", **SEND}
    if code == 11:
        return {"consumerGroup": group, "topic": topic, **PULL, **PULL_TIMES}
    return {"topic": topic, "queueId": "0"} if code == 30 else {}
