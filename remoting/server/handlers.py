"""The types of request handlers, and of the outcomes they return."""

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from msgspec import Struct

from trimq.protocol.command import RemotingCommand
from trimq.protocol.typed_request import TypedRequest

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection


class Later(Enum):
    """Outcomes of a handler that replies later."""

    DEFERRED = "deferred"
    """The reply comes by ``Connection.complete``; the request counts as in flight until then."""

    HELD = "held"
    """The reply comes by ``Connection.settle``: a long poll, which may wait long and does not count as in flight."""


DEFERRED: Final = Later.DEFERRED
HELD: Final = Later.HELD

Reply: TypeAlias = bytes | RemotingCommand | None
Outcome: TypeAlias = Reply | Literal[Later.DEFERRED, Later.HELD] | Awaitable["Outcome"]
"""bytes (a complete frame) or a RemotingCommand: the reply, queued now. None: no reply, or it is queued already. An
awaitable: the reactor runs it as a task, and its result is again an outcome."""

Handler: TypeAlias = Callable[["Connection", RemotingCommand], Outcome]
"""Called with each request. The reply to a one-way request is dropped.

The body and the raw ext fields of the command are views of the receive buffer, valid until the handler returns. A
handler that needs them for longer is registered with ``copy_body=True``; coroutine functions always get copies.

RemotingError becomes an error reply. Any other exception becomes SYSTEM_ERROR and is logged.
"""


FastHandler: TypeAlias = Callable[["Connection", TypedRequest[Any]], bytes | Literal[Later.DEFERRED] | None]
"""Serves the ordinary requests of a code that arrive in JSON. Envelope and header have been decoded in one pass.

None means that the request is not an ordinary one and that there were no side effects: the code's Handler then gets it
as a command with its header already decoded. It is called only while requests in flight are below their limits, and may
raise what a Handler may raise. The body is a view of the receive buffer, as for a Handler.
"""


class Span(Struct, gc=False):
    """One connection's part of a group: bytes [begin, end) of the frames; only the last frame may be incomplete.

    ``most`` is how many of the frames may be served. ``continues``: the start of the first one was received in an
    earlier turn.
    """

    connection: "Connection"
    begin: int
    end: int
    most: int
    continues: bool = False


class Served(Struct, gc=False):
    """The result of a GroupedServer. Each sequence has one entry per span, in the order of the spans.

    ``parts``: how many frames of the span were served, counted from its start, and the offset of the next frame.
    ``replies``: the replies as joined complete frames. With ``deferred`` there are none yet: they come by
    ``Connection.complete``.
    """

    parts: Sequence[tuple[int, int]]
    replies: Sequence[bytes] = ()
    deferred: bool = False

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether there is a valid entry for every span."""
        if len(self.parts) != len(spans) or not (self.deferred or len(self.replies) == len(spans)):
            return False
        for (count, stop), span in zip(self.parts, spans, strict=True):  # all() takes half as long again
            if not (0 <= count <= span.most and span.begin <= stop <= span.end):
                return False
        return True


class GroupedServer(Protocol):
    """Serves many requests of a round in one call: frames in, replies out.

    It hands back frames that it does not support, without side effects, and these are served one by one. That path is
    the reference: a request served here must have the same reply and the same effects. One server may be registered for
    several codes that the same features have to see (``Gate.about``): their requests are then served together.
    """

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        """Serve the supported frames at the start of each span, at most ``most`` in all. None: none was served.

        ``frames`` is valid until this returns. The first frame of each span has a code that this server is registered
        for; frames of other codes are to be handed back.
        """
        ...

    def serve_one(self, connection: "Connection", frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        """Serve a single JSON request and return its reply. None: it was not served, and there are no side effects."""
        ...


def with_copy(handler: Handler) -> Handler:
    """``handler``, called with commands whose buffers are copies."""

    def copying(connection: "Connection", command: RemotingCommand) -> Outcome:
        command.copy_buffers()
        return handler(connection, command)

    return copying
