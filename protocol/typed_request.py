"""TypedRequest: a request in JSON whose envelope and ext fields are decoded in one pass.

What a RemotingCommand takes two passes for (the envelope, and then the ext fields as the header of its code) takes one
here, which is what a server does with the requests that come by the dozen. ``command`` makes a RemotingCommand of it
that keeps the header, for handlers that have to see all of a request.
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
"""What a decoder raises for a header that has to be decoded in two passes: the tolerant one, or not at all."""


class TypedRequest(Struct, Generic[H], gc=False):
    """The fields of a RemotingCommand of which ``header`` has been decoded already.

    ``body`` is set by whoever decodes; it may be a view into a receive buffer. All fields that a RemotingCommand takes
    are here, so that what is accepted is accepted there too: the last two of them are for nothing else.
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
        """The same as a command. ``head`` is the JSON header that this was decoded from."""
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


class TypedCommand(RemotingCommand, gc=False):
    """A command with a header that was decoded together with its envelope.

    ``head`` is its whole JSON header, from which fields are read that ``typed`` does not have: it has neither
    ``ext_raw`` nor ``ext``.
    """

    typed: Any = field(name="~typed", default=None)
    head: Any = field(name="~head", default=b"")

    def header(self, kind: type[T]) -> T:
        """See RemotingCommand."""
        if type(self.typed) is kind:
            return self.typed
        return self._whole().header(kind)

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
    """Decodes JSON headers of requests with this header. Raises one of NOT_DECODED."""
    decode: Callable[[Any], TypedRequest[H]] = msgspec.json.Decoder(TypedRequest[header], strict=False).decode  # type: ignore[valid-type]
    return decode
