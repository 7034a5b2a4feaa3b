"""What a server does with a request: handlers by request code, and the outcomes they may have."""

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from msgspec import Struct

from trimq.protocol.command import RemotingCommand
from trimq.protocol.typed_request import TypedRequest

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection


class Later(Enum):
    """Outcomes of a handler whose reply comes later."""

    DEFERRED = "deferred"
    """By ``Connection.complete``; counts as a request in flight until then."""

    HELD = "held"
    """By ``Connection.settle``: a long poll, which may wait for long and does not count as in flight."""


DEFERRED: Final = Later.DEFERRED
HELD: Final = Later.HELD

Reply: TypeAlias = bytes | RemotingCommand | None
Outcome: TypeAlias = Reply | Literal[Later.DEFERRED, Later.HELD] | Awaitable["Outcome"]
"""bytes (a whole frame) or a RemotingCommand: the reply, queued now. None: nothing more to send. An awaitable: the
reactor runs it as a task and treats its result in the same way."""

Handler: TypeAlias = Callable[["Connection", RemotingCommand], Outcome]
"""Called with each request. The reply to a one-way request is dropped.

The body and the raw ext fields of the command are views into the receive buffer, valid until the handler returns. A
handler that keeps them is registered with ``copy_body=True``; coroutine functions always are.

RemotingError becomes an error reply; any other exception becomes SYSTEM_ERROR and an event in the log.
"""


FastHandler: TypeAlias = Callable[["Connection", TypedRequest[Any]], bytes | Literal[Later.DEFERRED] | None]
"""Serves the ordinary requests of a code, as they arrived in JSON, decoded in one pass with the header of their code.

None: this request is not an ordinary one, and there are no side effects; the code's Handler gets it as a command that
has its header already. It is called only where the limits of requests in flight are kept, and it may raise whatever a
Handler may. The body is a view as it is for a Handler.
"""


class Span(Struct, gc=False):
    """What one connection has sent: bytes [begin, end) of what it is served from, whole frames but for the last one.

    ``most``: how many of them may be served. ``continues``: the first one had begun in an earlier turn.
    """

    connection: "Connection"
    begin: int
    end: int
    most: int
    continues: bool = False


class Served(Struct, gc=False):
    """What a GroupedServer has served, span by span: an entry for each in every column, in their order.

    ``parts``: how many frames of each span, its first ones, and where the next one begins. ``replies``: whole frames,
    joined; nothing where ``deferred``: they come by ``Connection.complete``.
    """

    parts: Sequence[tuple[int, int]]
    replies: Sequence[bytes] = ()
    deferred: bool = False

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether it tells what became of each span."""
        if len(self.parts) != len(spans) or not (self.deferred or len(self.replies) == len(spans)):
            return False
        for (count, stop), span in zip(self.parts, spans, strict=True):  # all() takes half as long again
            if not (0 <= count <= span.most and span.begin <= stop <= span.end):
                return False
        return True


class GroupedServer(Protocol):
    """Serves many requests of a round at once: frames in, replies out.

    What it does not know it hands back untouched, and these are served one by one, which is the reference: whatever it
    serves has the same replies and the same effects.
    """

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        """Serve what it can of each span, ``most`` in all; None: nothing of any.

        ``frames`` is valid until this returns. The first frame of each span is of a code that it is registered for; it
        serves no others.
        """
        ...

    def serve_one(self, connection: "Connection", frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        """The same for one request in JSON that has come alone: its reply. None: nothing has happened."""
        ...


def with_copy(handler: Handler) -> Handler:
    """A handler that gets a command of its own bytes."""

    def copying(connection: "Connection", command: RemotingCommand) -> Outcome:
        command.copy_buffers()
        return handler(connection, command)

    return copying
