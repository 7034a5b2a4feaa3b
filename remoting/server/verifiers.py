"""Verifiers: look at the requests of fast paths in front of them, for features that have to see each request's bytes.

A verifier may have to remember what was served, such as a request that is served only once. It must not do so before: a
fast path may decline the request, which then gets to the full path and to ``Feature.check``. So it returns a commit,
which is called as soon as the fast path has served the request. Nothing else runs between the two.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from trimq.protocol.typed_request import HeadedRequest, TypedRequest
from trimq.remoting.server.handlers import FastHandler, GroupedServer, Later, Served, Span

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection

Commit = Callable[[], None]
"""Called when the request was served. After an exception too, since it is unknown then whether it was."""

CommitParts = Callable[[Sequence[tuple[int, int]] | None], None]
"""Called with ``Served.parts``; None: what was served is unknown, it may be everything."""

_Answer = TypeVar("_Answer")


class Verifier(Protocol):
    """Looks at the requests of fast paths, in front of them.

    It may let through only what ``Feature.check`` lets through. A request that it does not let through is no refused
    one: the full path serves it, behind ``check``. It has no side effects and counts nothing, since a fast path may
    decline the request afterwards, and ``check`` sees it then. Its commits have them. None of these raises exceptions.
    """

    def verify(self, connection: "Connection", code: int, request: HeadedRequest[Any]) -> bool | Commit:
        """Whether a fast handler may serve ``request``, with its header and body as received."""
        ...

    def verify_frame(self, connection: "Connection", frame: memoryview) -> bool | Commit:
        """Whether GroupedServer.serve_one may serve ``frame``."""
        ...

    def verify_spans(
        self, frames: memoryview, spans: Sequence[Span], most: int
    ) -> tuple[Sequence[Span], CommitParts | None]:
        """The spans without their first frame that GroupedServer.serve may not serve, and without all after it.

        A span may be left empty. ``most``: no more frames than these have to be looked at in all.
        """
        ...


Guard = Callable[["Connection"], bool]
"""Whether fast paths are open to a connection."""


def verified(code: int, fast: FastHandler, guard: Guard | None, verifiers: Sequence[Verifier]) -> FastHandler:
    """``fast`` behind a guard and verifiers: None for what one of them does not let through.

    With verifiers, the requests have to be HeadedRequests.
    """
    if len(verifiers) == 1 and guard is None:  # access alone, the usual case
        verify = verifiers[0].verify

        def serve_verified(
            connection: "Connection", request: TypedRequest[Any]
        ) -> bytes | Literal[Later.DEFERRED] | None:
            found = verify(connection, code, request)  # type: ignore[arg-type]  # the table decodes HeadedRequests for it
            if found is True:
                return fast(connection, request)
            return _committed([found], fast, connection, request) if found else None

        return serve_verified
    if guard is None and not verifiers:
        return fast

    def serve(connection: "Connection", request: TypedRequest[Any]) -> bytes | Literal[Later.DEFERRED] | None:
        if guard is not None and not guard(connection):
            return None
        commits = []
        for verifier in verifiers:
            found = verifier.verify(connection, code, request)  # type: ignore[arg-type]  # as above
            if not found:
                return None
            if found is not True:
                commits.append(found)
        return _committed(commits, fast, connection, request)

    return serve


def _committed(commits: Sequence[Commit], serve: Callable[..., _Answer | None], *request: Any) -> _Answer | None:
    """``serve``, and call the commits unless it has declined the request."""
    try:
        answer = serve(*request)
    except BaseException:
        for commit in commits:
            commit()
        raise
    if answer is not None:
        for commit in commits:
            commit()
    return answer


class VerifiedGroup:
    """A GroupedServer behind a guard, which has to pass the connection of every span, and behind verifiers."""

    def __init__(self, server: GroupedServer, guard: Guard | None, verifiers: Sequence[Verifier]) -> None:
        self._server = server
        self._guard = guard
        self._verifiers = verifiers

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        """See GroupedServer."""
        guard = self._guard
        if guard is not None and not all(guard(span.connection) for span in spans):
            return None
        commits: tuple[CommitParts, ...] = ()
        for verifier in self._verifiers:
            spans, commit = verifier.verify_spans(frames, spans, most)
            if not any(span.most for span in spans):
                return None
            if commit is not None:
                commits += (commit,)
        parts = None
        try:
            served = self._server.serve(frames, spans, most)
            if commits:
                parts = [(0, 0)] * len(spans) if served is None else served.parts if served.fits(spans) else None
        finally:
            for commit in commits:
                commit(parts)
        return served

    def serve_one(self, connection: "Connection", frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        """See GroupedServer."""
        if self._guard is not None and not self._guard(connection):
            return None
        commits = []
        for verifier in self._verifiers:
            found = verifier.verify_frame(connection, frame)
            if not found:
                return None
            if found is not True:
                commits.append(found)
        if commits:
            return _committed(commits, self._server.serve_one, connection, frame)
        return self._server.serve_one(connection, frame)
