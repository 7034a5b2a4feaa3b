r"""The text of message traces: what clients report about a message, as the body of messages of RMQ_SYS_TRACE_TOPIC.

A body is a series of traces. The fields of a trace are separated by 0x01, and each trace ends with 0x02; the first
field is its type. Traces are written as RocketMQ 5.5.0 and 4.9.8 do (TraceDataEncoder); the shorter and longer traces
of other versions are read too. A value that is missing is written as the word ``null``.

>>> trace = RecallTrace(1_700_000_000_000, "DefaultRegion", "orders", "Orders", "7F01", True)
>>> encode_trace(trace)
'Recall\x011700000000000\x01DefaultRegion\x01orders\x01Orders\x017F01\x01true\x02'
>>> decode_traces(encode_trace(trace) + "Rumour\x01x\x02") == ([trace], 1)
True
"""

import re
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple, TypeAlias

from trimq.protocol.message_keys import key_words

FIELD_END: Final = "\x01"
"""RocketMQ's CONTENT_SPLITOR."""
TRACE_END: Final = "\x02"
"""RocketMQ's FIELD_SPLITOR."""
TRACE_GROUP_PREFIX: Final = "_INNER_TRACE_PRODUCER"
"""The start of the names of the groups that send traces."""
DEFAULT_REGION: Final = "DefaultRegion"
_NULL: Final = "null"


class TraceType(StrEnum):
    """The first field of a trace."""

    PUB = "Pub"
    SUB_BEFORE = "SubBefore"
    SUB_AFTER = "SubAfter"
    END_TRANSACTION = "EndTransaction"
    RECALL = "Recall"


class MessageType(IntEnum):
    """The kind of a message in its trace (RocketMQ's MessageType, by ordinal)."""

    NORMAL = 0
    TRANS_HALF = 1
    TRANS_COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeReturnType(IntEnum):
    """How the processing of a message ended: the context code of a SubAfterTrace."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURN_NULL = 3
    FAILED = 4


class EndState(StrEnum):
    """The state of a transaction in an EndTransactionTrace (RocketMQ's LocalTransactionState)."""

    COMMIT = "COMMIT_MESSAGE"
    ROLLBACK = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOW"


class PubTrace(NamedTuple):
    """A send. ``timestamp`` is its start in ms since the epoch, ``cost`` its duration in ms.

    ``client_host`` is written by some older versions only.
    """

    timestamp: int
    region: str | None
    group: str
    topic: str
    message_id: str
    tags: str | None
    keys: str | None
    store_host: str
    body_length: int
    cost: int
    message_type: MessageType
    offset_message_id: str | None
    success: bool
    client_host: str | None = None

    @property
    def type(self) -> TraceType:
        """The type of this trace."""
        return TraceType.PUB


class SubBeforeTrace(NamedTuple):
    """The start of a message's processing. The SubAfterTrace of its end has the same ``request_id``."""

    timestamp: int
    region: str | None
    group: str
    request_id: str
    message_id: str
    retry_times: int
    keys: str | None

    @property
    def type(self) -> TraceType:
        """The type of this trace."""
        return TraceType.SUB_BEFORE


class SubAfterTrace(NamedTuple):
    """The end of a message's processing, which took ``cost`` ms. Old versions write no time and no group."""

    request_id: str
    message_id: str
    cost: int
    success: bool
    keys: str | None
    context_code: int = 0
    timestamp: int | None = None
    group: str | None = None

    @property
    def type(self) -> TraceType:
        """The type of this trace."""
        return TraceType.SUB_AFTER


class EndTransactionTrace(NamedTuple):
    """The end of a transaction, as the producer sent it to the broker."""

    timestamp: int
    region: str | None
    group: str
    topic: str
    message_id: str
    tags: str | None
    keys: str | None
    store_host: str
    message_type: MessageType
    transaction_id: str | None
    state: EndState
    from_transaction_check: bool

    @property
    def type(self) -> TraceType:
        """The type of this trace."""
        return TraceType.END_TRANSACTION


class RecallTrace(NamedTuple):
    """The recall of a timed message."""

    timestamp: int
    region: str | None
    group: str
    topic: str
    message_id: str
    success: bool

    @property
    def type(self) -> TraceType:
        """The type of this trace."""
        return TraceType.RECALL

    @property
    def keys(self) -> None:
        """None: a recall knows only the message's id."""


MessageTrace: TypeAlias = PubTrace | SubBeforeTrace | SubAfterTrace | EndTransactionTrace | RecallTrace


class TraceText(NamedTuple):
    """A decoded text: its traces, and the number of those that could not be decoded."""

    traces: list[MessageTrace]
    skipped: int


def encode_trace(trace: MessageTrace) -> str:
    """A trace as text.

    Raises ValueError if a field has one of the separators in it. A Pub's ``client_host`` is not written, as RocketMQ
    5.5.0 does not write it; a SubAfter without a time and a group has neither field.
    """
    fields: Sequence[object] = trace
    if isinstance(trace, PubTrace):
        fields = trace[:-1]
    elif isinstance(trace, SubAfterTrace) and trace.timestamp is None:
        fields = trace[:-2]
    text = FIELD_END.join([trace.type, *[_text(field) for field in fields]])
    if text.count(FIELD_END) != len(fields) or TRACE_END in text:
        raise ValueError(f"a field of the trace of {trace.message_id[:64]!r} contains a separator (0x01 or 0x02)")
    return text + TRACE_END


def trace_keys(trace: MessageTrace) -> list[str]:
    """The keys by which queries find a trace: the message's id and its keys."""
    return key_words(f"{trace.message_id} {trace.keys}" if trace.keys else trace.message_id)


def decode_traces(text: str) -> TraceText:
    """The traces of a text. Those of an unknown type, or with missing or invalid fields, are skipped and counted."""
    traces: list[MessageTrace] = []
    skipped = 0
    for line in text.split(TRACE_END):
        if not line:
            continue
        kind, *fields = line.split(FIELD_END)
        decode = _DECODERS.get(kind)
        try:
            if decode is None:
                skipped += 1
            else:
                traces.append(decode(fields))
        except (ValueError, IndexError):
            skipped += 1
    return TraceText(traces, skipped)


def _text(value: object) -> str:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, IntEnum):
        return str(value.value)
    return str(value)


_number: Final = re.compile(r"[-+]?[0-9]{1,19}\Z").match


def _int(text: str) -> int:
    """A decimal number. Not int() alone, which takes blanks, underscores and other digits too."""
    if _number(text) is None:
        raise ValueError(f"no number: {text[:32]!r}")
    return int(text)


def _bool(text: str) -> bool:
    return text.lower() == "true"


def _or_none(text: str) -> str | None:
    return None if text == _NULL else text


def _pub(f: list[str]) -> PubTrace:
    """11 fields and the success. Old versions have no offset id before it, some have the client's host after it."""
    with_offset_id = len(f) > 12
    return PubTrace(
        timestamp=_int(f[0]),
        region=_or_none(f[1]),
        group=f[2],
        topic=f[3],
        message_id=f[4],
        tags=_or_none(f[5]),
        keys=_or_none(f[6]),
        store_host=f[7],
        body_length=_int(f[8]),
        cost=_int(f[9]),
        message_type=MessageType(_int(f[10])),
        offset_message_id=_or_none(f[11]) if with_offset_id else None,
        success=_bool(f[12] if with_offset_id else f[11]),
        client_host=f[13] if len(f) > 13 else None,
    )


def _sub_before(f: list[str]) -> SubBeforeTrace:
    return SubBeforeTrace(_int(f[0]), _or_none(f[1]), f[2], f[3], f[4], _int(f[5]), _or_none(f[6]))


def _sub_after(f: list[str]) -> SubAfterTrace:
    """5 fields; in newer versions the context code, then time and group, which clients of Alibaba's cloud leave out."""
    code = _int(f[5]) if len(f) > 5 else 0
    timed = len(f) > 7
    return SubAfterTrace(
        f[0],
        f[1],
        _int(f[2]),
        _bool(f[3]),
        _or_none(f[4]),
        code,
        _int(f[6]) if timed else None,
        f[7] if timed else None,
    )


def _end_transaction(f: list[str]) -> EndTransactionTrace:
    return EndTransactionTrace(
        timestamp=_int(f[0]),
        region=_or_none(f[1]),
        group=f[2],
        topic=f[3],
        message_id=f[4],
        tags=_or_none(f[5]),
        keys=_or_none(f[6]),
        store_host=f[7],
        message_type=MessageType(_int(f[8])),
        transaction_id=_or_none(f[9]),
        state=EndState(f[10]),
        from_transaction_check=_bool(f[11]),
    )


def _recall(f: list[str]) -> RecallTrace:
    return RecallTrace(_int(f[0]), _or_none(f[1]), f[2], f[3], f[4], _bool(f[5]))


_DECODERS: Final[dict[str, Callable[[list[str]], MessageTrace]]] = {
    TraceType.PUB: _pub,
    TraceType.SUB_BEFORE: _sub_before,
    TraceType.SUB_AFTER: _sub_after,
    TraceType.END_TRANSACTION: _end_transaction,
    TraceType.RECALL: _recall,
}
