"""What has to happen to a request, decided from its bytes by the facts alone, without the code under test.

The facts: docs/security.md, and RocketMQ's signature: base64 of HMAC-SHA1 over the values of the ext fields in the
order of their names (by UTF-16 units), without ``Signature``, and the body; up to version 393 without
``_UNIQUE_KEY_QUERY``.
"""

import base64
import hmac
import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

STAMP: Final = re.compile(rb"tmq1:(\d{1,10}):(\d{1,15}):([A-Za-z0-9_-]{16}):(\d{1,18});")
KEYS: Final = {"code", "extFields", "flag", "language", "opaque", "version", "serializeTypeCurrentRPC"}
SURROGATE: Final = re.compile("[\ud800-\udfff]")
WINDOW_MS: Final = 300_000
NUMBERS: Final = {
    310: ("d", "e", "f", "g", "h"),
    10: ("defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag"),
    11: ("queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset", "suspendTimeoutMillis", "subVersion"),
    30: ("queueId",),
}
"""The mandatory numbers of each code's header."""
OTHERS: Final = {310: ("a", "c"), 10: ("producerGroup", "defaultTopic"), 11: (), 30: ()}
OPTIONAL: Final = frozenset("ijklmn") | {"properties", "reconsumeTimes", "unitMode", "batch", "maxReconsumeTimes"}


class Read(NamedTuple):
    """A request as read. ``size``: bytes of its header. ``is_odd``: with what no client sends, so it may be broken."""

    code: int
    version: int
    fields: dict[str, str]
    is_odd: bool
    body: bytes
    size: int


class Judgement(NamedTuple):
    """``signature``: whether it is right, of a user there is; ``served``: what has to happen, None if either may.

    None for ``signature``: it cannot be read, and must not be served.
    """

    signature: bool | None
    served: bool | None
    read: Read | None = None


def signed_text(fields: Mapping[str, str]) -> bytes:
    """What is signed of the ext fields, all of which are given."""
    names = sorted(
        (name for name in fields if name != "Signature"), key=lambda name: name.encode("utf-16-be", "surrogatepass")
    )
    text = "".join(fields[name] for name in names)
    return text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass").encode("utf-8", "replace")


def digest_of(secret: str, signed: bytes) -> str:
    """The signature."""
    return base64.b64encode(hmac.new(secret.encode(), signed, "sha1").digest()).decode()


def read(frame: bytes) -> Read | None:
    """None if it cannot be read."""
    size = int.from_bytes(frame[5:8], "big")
    head, body = frame[8 : 8 + size], frame[8 + size :]
    try:
        return Read(*(_binary(head) if frame[4] == 1 else _json(head)), body, size)
    except (ValueError, TypeError, AttributeError, KeyError, struct.error):
        return None


def _json(head: bytes) -> tuple[int, int, dict[str, str], bool]:
    is_text = True
    try:
        text = head.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # the rest may be read all the same
        text, is_text = head.decode("utf-8", "surrogateescape"), False
    header = json.loads(text)
    fields = {name: _text(value) for name, value in (header.get("extFields") or {}).items() if value is not None}
    is_usual = is_text and header.keys() <= KEYS and not SURROGATE.search("".join([*fields, *fields.values()]))
    return int(header["code"]), int(header.get("version", 0)), fields, not is_usual


def _text(value: Any) -> str:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    return str(value) if isinstance(value, float) else json.dumps(value, separators=(",", ":"))


def _binary(head: bytes) -> tuple[int, int, dict[str, str], bool]:
    code, _, version, _, _ = struct.unpack_from(">hBhii", head)
    at = 13 + 4 + struct.unpack_from(">I", head, 13)[0]
    size, at, fields = struct.unpack_from(">I", head, at)[0], at + 4, dict[str, str]()
    if at + size != len(head):
        raise ValueError("the ext fields are longer or shorter than their length says")
    while at < len(head):
        size = struct.unpack_from(">H", head, at)[0]
        name, at = head[at + 2 : at + 2 + size].decode(), at + 2 + size
        size = struct.unpack_from(">I", head, at)[0]
        fields[name], at = head[at + 4 : at + 4 + size].decode(), at + 4 + size
    if at != len(head):
        raise ValueError("a field is longer than the header")
    return code, version, fields, False


class Referee:
    """Judges requests on plain connections, each once, in their order.

    The users: ``root`` is a Super, ``all`` and ``strict`` may do everything that has an entry, ``app`` and ``Jürgen``
    may send to T, ``reader`` may consume T in G, ``off`` is a disabled Super. Requests of ``strict`` need a stamp.
    """

    def __init__(self, secrets: Mapping[str, str], now: Callable[[], int]) -> None:
        self._secrets = secrets
        self._now = now
        self._seen: set[tuple[str, bytes, int]] = set()
        self._maybe: set[tuple[str, bytes, int]] = set()

    def judge(self, frame: bytes) -> Judgement:
        """What has to happen to it."""
        request = read(frame)
        if request is None:
            return Judgement(None, False)
        code, version, fields, is_odd, body, size = request
        name = fields.get("AccessKey", "")
        left_out = "_UNIQUE_KEY_QUERY" if version <= 393 else ""
        counted = {key: value for key, value in fields.items() if not left_out or key != left_out}
        signed = signed_text(counted) + body
        secret = self._secrets.get(name)
        if secret is None or fields.get("Signature") != digest_of(secret, signed):
            return Judgement(False, False, request)
        if len(fields) > 1024 or (size > 280_000 and frame[4] == 0):
            return Judgement(True, False, request)
        is_new = name != "off" and self._is_new(name, code, signed, is_odd)
        served = permitted(name, code, fields) if is_new is not False else False
        return Judgement(True, None if served and (is_odd or is_new is None) else served, request)

    def _is_new(self, name: str, code: int, signed: bytes, is_odd: bool) -> bool | None:
        """None if an odd request, which may have been a broken frame, had this stamp before."""
        if not signed.startswith(b"tmq1:"):
            return name != "strict"
        found = STAMP.match(signed)
        if found is None or int(found[1]) != code or abs(int(found[2]) - self._now()) > WINDOW_MS:
            return False
        key = (name, found[3], int(found[4]))
        if key in self._seen:
            return False
        if is_odd:
            self._maybe.add(key)
            return True
        self._seen.add(key)
        return None if key in self._maybe else True


def permitted(name: str, code: int, fields: Mapping[str, str]) -> bool | None:
    """Whether a user may do it; None if that depends on fields other than names, which may be invalid."""
    if code in (3005, 3003, 25):  # administration needs TLS
        return False
    if name == "root":
        return True
    if code == 26:
        return name in ("all", "strict")
    if code == 35:  # needs nothing if it names no group
        return None
    if code not in NUMBERS:
        return False
    topic, group = fields.get("b" if code == 310 else "topic", "").strip(), fields.get("consumerGroup", "").strip()
    if not may(
        name, code, fields.get("b" if code == 310 else "topic", ""), fields.get("consumerGroup", ""), topic, group
    ):
        return False
    whole = all(re.fullmatch("[0-9]{1,9}", fields.get(number, "")) for number in NUMBERS[code])
    others = all(other in fields for other in OTHERS[code])
    return True if whole and others and OPTIONAL.isdisjoint(fields) else None


def may(name: str, code: int, topic: str, group: str, some_topic: str, some_group: str) -> bool:
    """By the policies. The last two are blank if there is no such name."""
    if not some_topic or (code == 11 and not some_group):
        return False
    retry_of = topic.removeprefix("%RETRY%") if topic.startswith("%RETRY%") else None
    own = group.removeprefix("%RETRY%")
    if (retry_of is not None and not retry_of.strip()) or (code == 11 and not own.strip()):
        return False
    if code == 11 and retry_of is not None and retry_of != own:
        return False
    if name in ("all", "strict"):
        return True
    if name == "reader":
        if code in (310, 10):
            return retry_of == "G"
        return (topic == "T" or retry_of == "G") and (code != 11 or own == "G")
    return code in (310, 10) and topic == "T"
