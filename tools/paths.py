"""Counts the places that a request passes through, which a feature may have to change. ``python -m tools.paths``.

The first part runs a broker in this process. For each kind of request it lists our files and functions that run between
the arrival of the request's bytes and its reply, with the number of calls. The second part analyses the code: the
functions that append to the log and that dispatch, the modules with rules of dispatch, and those that parse the text of
properties.
"""

import argparse
import ast
import itertools
import json
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import trio

from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode

ROOT: Final = Path(__file__).resolve().parents[1]
_PACKAGES: Final = ("broker", "protocol", "remoting")
_TOPIC: Final = "Paths"
_BURST: Final = 64
_KINDS: Final = {"TRANSACTION_NOT", "TRANSACTION_PREPARED", "TRANSACTION_COMMIT", "TRANSACTION_ROLLBACK"}
_OTHER_TEXTS = frozenset({"protocol/message_trace.py"})
"""Modules for texts with the same separators that are not properties."""
_KIND_BITS: Final = {4, 8, 12}
_MOVES: Final = {"rolled", "start_at", "__init__", "_skip", "catch_up"}
"""Functions that move the dispatch position but dispatch no record."""

Sent = list[tuple[int, dict[str, Any], bytes, Encoding]]


def _properties(number: int, more: dict[str, str] | None = None) -> str:
    values = {"KEYS": "k", "UNIQ_KEY": f"{number:032X}", "TAGS": "TagA", "WAIT": "true"} | (more or {})
    return "".join(f"{name}\x01{value}\x02" for name, value in values.items())


def _send(number: int, more: dict[str, str] | None = None, *, batch: bool = False) -> dict[str, Any]:
    text = "WAIT\x01true\x02" if batch else _properties(number, more)
    born = 1_700_000_000_000
    fields: dict[str, Any] = {"a": "P", "b": _TOPIC, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": born, "h": 0}
    return fields | {"i": text, "j": 0, "k": "false", "m": str(batch).lower()}


def _batch(sizes: list[int]) -> bytes:
    def one(number: int, size: int) -> bytes:
        text = _properties(number).encode()
        head = struct.pack(">5I", 22 + size + len(text), 0, 0, 0, size)
        return head + bytes(size) + struct.pack(">H", len(text)) + text

    return b"".join(itertools.starmap(one, enumerate(sizes)))


def _pull() -> dict[str, Any]:
    fields: dict[str, Any] = {"consumerGroup": "G", "topic": _TOPIC, "queueId": 0, "queueOffset": 0, "maxMsgNums": 4}
    fields |= {"sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 1000, "subscription": "*", "subVersion": 0}
    return fields | {"expressionType": "TAG"}


def _kinds() -> dict[str, Sent]:
    send, batch, pull = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.PULL_MESSAGE
    query = {"topic": _TOPIC, "key": "k", "maxNum": 4, "beginTimestamp": 0, "endTimestamp": 1 << 60}
    encodings = {"JSON": Encoding.JSON, "binary": Encoding.ROCKETMQ}
    kinds: dict[str, Sent] = {}
    for name, encoding in encodings.items():
        kinds[f"send, {name}"] = [(send, _send(1), b"body", encoding)]
    kinds["send with a delay"] = [(send, _send(1, {"DELAY": "1"}), b"body", Encoding.JSON)]
    kinds["sends of a round"] = [(send, _send(number), b"body", Encoding.JSON) for number in range(_BURST)]
    kinds["batch"] = [(batch, _send(1, batch=True), _batch([1, 20, 3]), Encoding.JSON)]
    for name, encoding in encodings.items():
        kinds[f"pull, {name}"] = [(pull, _pull(), b"", encoding)]
    kinds["query, JSON"] = [(RequestCode.QUERY_MESSAGE, query, b"", Encoding.JSON)]
    return kinds


class _Client:
    """A client that splits replies without our modules, so that only the broker's functions are traced."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._opaque = itertools.count(100_000)

    def frames(self, sent: Sent) -> bytes:
        """The frames of requests, of one length as far as possible: then a burst of them can be served as a group."""
        data = b""
        for code, ext, body, encoding in sent:
            opaque = next(self._opaque)
            fields = {key: str(value) for key, value in ext.items()}
            if encoding is Encoding.JSON:
                header = {"code": int(code), "extFields": fields, "flag": 0}
                header |= {"language": "JAVA", "opaque": opaque, "version": 479}
                raw = json.dumps(header, separators=(",", ":")).encode()
                data += struct.pack(">II", 4 + len(raw) + len(body), len(raw)) + raw + body
            else:
                data += encode(RemotingCommand(code, opaque, ext=fields, body=body, encoding=encoding))
        return data

    async def ask(self, data: bytes, count: int) -> bytes:
        """Send frames and receive ``count`` replies."""
        await self._stream.send_all(data)
        replies, at = b"", 0
        while True:
            while at + 4 <= len(replies) and at + 4 + int.from_bytes(replies[at : at + 4], "big") <= len(replies):
                at += 4 + int.from_bytes(replies[at : at + 4], "big")
                count -= 1
            if not count:
                return replies
            replies += await self._stream.receive_some(1 << 20)


def _place(frame: FrameType) -> tuple[str, str] | None:
    path = frame.f_code.co_filename
    for package in _PACKAGES:
        at = path.find(f"/{package}/")
        if at >= 0 and "site-packages" not in path:
            return path[at + 1 :], frame.f_code.co_qualname
    return None


async def _traced(client: _Client, sent: Sent) -> dict[str, dict[str, int]]:
    """Our functions that run until the replies have arrived, by file, with the number of calls."""
    seen: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            place = _place(frame)
            if place is not None:
                seen[place] += 1

    data = client.frames(sent)
    sys.setprofile(profile)
    try:
        replies = await client.ask(data, len(sent))
    finally:
        sys.setprofile(None)
    refused = [(command.code, command.remark) for command in FrameDecoder().feed(replies) if command.code]
    if refused:
        raise SystemExit(f"the broker refused a request: {refused[0]}")
    found: dict[str, dict[str, int]] = {}
    for (file, function), calls in sorted(seen.items()):
        found.setdefault(file, {})[function] = calls
    return found


async def dynamic(flush: str) -> dict[str, dict[str, dict[str, int]]]:
    """The functions that run for each kind of request, by file, including those of background tasks of the broker."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    with tempfile.TemporaryDirectory(prefix="trimq-paths-") as directory:
        async with running_broker(Path(directory), flushDiskType=flush) as broker:
            stream = await trio.open_tcp_stream(*broker.endpoint)
            async with stream:
                client = _Client(stream)
                topic = {"topic": _TOPIC, "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
                topic |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
                made: Sent = [(RequestCode.UPDATE_AND_CREATE_TOPIC, topic, b"", Encoding.JSON)]
                await client.ask(client.frames(made), 1)
                for kind, sent in _kinds().items():
                    for _ in range(4):  # warm-up: learns layouts, creates topics and counters
                        await client.ask(client.frames(sent), len(sent))
                    found[kind] = await _traced(client, sent)
    return found


# -- the code


def _functions(root: Path, folders: list[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    yield str(path.relative_to(root)), node


def _assigned(function: ast.FunctionDef) -> set[str]:
    """The names of attributes that a function assigns to; ``[]`` for an assignment into a buffer."""
    found = set()
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute):
                found.add(target.attr)
            elif isinstance(target, ast.Subscript) and "buffer" in ast.unparse(target.value):
                found.add("[]")
    return found


def static(root: Path) -> dict[str, list[str]]:
    """The functions that append to the log and that dispatch; the modules with rules of dispatch, and property readers.

    A function is recognised by the attributes that it assigns to. Raises AssertionError if a function in _MOVES does
    more than move the position.
    """
    appends, dispatches, rules, readers = [], [], set(), set()
    for file, function in _functions(root, ["broker"]):
        assigned = _assigned(function)
        if {"wrote", "last_store_timestamp", "[]"} <= assigned:
            appends.append(f"{file}:{function.name}")
        if {"position", "last_record"} <= assigned and function.name not in _MOVES:
            dispatches.append(f"{file}:{function.name}")
        if "wrote" not in assigned and {"position", "last_record", "max_phy"} <= assigned and function.name in _MOVES:
            raise AssertionError(f"{file}:{function.name} does more than move the position")
    for folder in ("broker/processors", "broker/services", "broker/store", "broker/tools", "protocol"):
        for path in sorted((root / folder).rglob("*.py")):
            text, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
            # Tools may read properties, since no request passes through them. Processors may test the kind of a
            # message, since a send may refuse it.
            if folder != "broker/tools" and name not in _OTHER_TEXTS and reads_property_text(text):
                readers.add(name)
            if folder in {"broker/store", "broker/tools", "protocol"} and decides_dispatch(text):
                rules.add(name)
    return {
        "appends": appends,
        "dispatches": dispatches,
        "rules of dispatch": sorted(rules),
        "readers of property text": sorted(readers),
    }


def decides_dispatch(text: str) -> bool:
    """Whether a module distinguishes records by their kind, or computes the tag slot of a unit from properties."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load) and _name(node) in _KINDS:
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and "flag" in ast.unparse(node):
            sides = (node.left, node.right)
            if any(isinstance(side, ast.Constant) and side.value in _KIND_BITS for side in sides):
                return True
        if isinstance(node, ast.Call) and _name(node.func) == "tags_code" and "propert" in ast.unparse(node):
            return True
    return False


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def reads_property_text(text: str) -> bool:
    """Whether a module parses properties: whether it uses their separators other than to write them."""
    tree = ast.parse(text)
    # Separators inside f-strings, concatenations and joins are written, unless they become a regular expression.
    written = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.BinOp) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join"
        ):
            calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
            if not any("re.compile" in ast.unparse(call.func) for call in calls):
                written |= {id(part) for part in ast.walk(node)}
    compiled = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile"
    ]
    for call in compiled:
        written -= {id(part) for part in ast.walk(call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in {"NAME_END", "VALUE_END"} and isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.Constant) and id(node) not in written and _is_separator(node.value):
            return True
    return False


def _is_separator(value: object) -> bool:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    # Encoded properties contain no other control characters; packed numbers do.
    if value == "\x01":  # a byte with one bit set: a parser never needs the end of names alone
        return False
    controls = {char for char in value if char < " "} if isinstance(value, str) else set()
    return bool(controls) and controls <= {"\x01", "\x02", "\x03"}


def main(arguments: list[str] | None = None) -> None:
    """Print the lists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files too")
    parser.add_argument("--functions", action="store_true", help="list the files and their functions too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = {flush: trio.run(dynamic, flush) for flush in ("ASYNC_FLUSH", "SYNC_FLUSH")}
    code = static(ROOT)
    if options.json:
        print(json.dumps({"paths": found, "code": code}))
        return
    for flush, kinds in found.items():
        print(flush)
        for kind, files in kinds.items():
            print(f"  {kind:20}{len(files):4} files{sum(map(len, files.values())):5} functions")
            for file, functions in files.items() if options.files or options.functions else ():
                print(f"      {file}" + (f": {', '.join(functions)}" if options.functions else ""))
    for name, places in code.items():
        print(f"{name}: {len(places)}", *places, sep="\n    ")


if __name__ == "__main__":
    main()
