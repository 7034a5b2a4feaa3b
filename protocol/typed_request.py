"""TypedRequest: a JSON request whose envelope and ext fields are decoded in one pass.

A RemotingCommand is decoded in two passes: the envelope, and then the ext fields as the header of its code. Frequent
requests are decoded in one pass here. ``command`` makes a RemotingCommand of one that has its header already, for
handlers that have to see the whole request.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import decode_at

H = TypeVar("H", bound=Struct)
T = TypeVar("T", bound=Struct)

NOT_DECODED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions for a header that this pass cannot decode: two passes can, by tolerant decoding, or it is malformed."""


class TypedRequest(Struct, Generic[H], gc=False):
    """The fields of a RemotingCommand, with a decoded ``header``.

    ``body`` is set by the code that decodes; it may be a view of a receive buffer. The struct has all fields of
    RemotingCommand, so that it accepts exactly the same JSON. The last two fields have no other purpose.
    """

    header: H = field(name="extFields")
    code: int
    opaque: int = 0
    flag: int = 0
    version: int = 0
    language: Any = None
    remark: str | None = None
    body: Any = field(name="~body", default=b"")
    unused_ext: dict[str, Any] | None = field(name="~ext", default=None)
    unused_encoding: Any = field(name="~encoding", default=None)

    def command(self, head: memoryview) -> RemotingCommand:
        """The request as a command. ``head`` is the JSON header that it was decoded from."""
        return TypedCommand(
            self.code,
            self.opaque,
            self.flag,
            self.version,
            self.language,
            self.remark,
            body=self.body,
            encoding=Encoding.JSON,
            typed=self.header,
            head=head,
        )


class HeadedRequest(TypedRequest[H], Generic[H], gc=False):
    """A TypedRequest with ``head``, the JSON header that it was decoded from. It may be a view, as ``body``."""

    head: Any = field(name="~head", default=b"")


class TypedCommand(RemotingCommand, gc=False):
    """A command whose header was decoded together with its envelope.

    It has neither ``ext_raw`` nor ``ext``: fields that ``typed`` does not have are decoded from ``head``, its complete
    JSON header.
    """

    typed: Any = field(name="~typed", default=None)
    head: Any = field(name="~head", default=b"")

    def header(self, kind: type[T]) -> T:
        """See RemotingCommand."""
        if type(self.typed) is kind:
            return self.typed
        return self._whole().header(kind)

    @property
    def ext_size(self) -> int:
        """See RemotingCommand; of the complete header."""
        return len(self.head)

    def ext_fields(self) -> dict[str, str]:
        """See RemotingCommand."""
        return self._whole().ext_fields()

    def copy_buffers(self) -> None:
        """See RemotingCommand."""
        self.body = bytes(self.body)
        self.head = bytes(self.head)

    def drop_buffers(self) -> None:
        """See RemotingCommand."""
        self.body = self.head = b""
        self.typed = None

    def _whole(self) -> RemotingCommand:
        head = memoryview(self.head)
        return decode_at(head, len(head), 0, len(head)) if head else RemotingCommand(self.code)


@cache
def decoder(header: type[H]) -> Callable[[Any], TypedRequest[H]]:
    """A function that decodes JSON headers with ext fields of this type. It raises one of NOT_DECODED."""
    decode: Callable[[Any], TypedRequest[H]] = msgspec.json.Decoder(TypedRequest[header], strict=False).decode  # type: ignore[valid-type]
    return decode


@cache
def headed_decoder(header: type[H]) -> Callable[[Any], HeadedRequest[H]]:
    """The same with the header as received."""
    decode: Callable[[Any], HeadedRequest[H]] = msgspec.json.Decoder(HeadedRequest[header], strict=False).decode  # type: ignore[valid-type]

    def decode_and_keep(head: Any) -> HeadedRequest[H]:
        request = decode(head)
        request.head = head
        return request

    return decode_and_keep
