"""Handshakes: the unfinished TLS handshakes of a server, bounded in number and time.

A step of a handshake costs more than hundreds of requests: the server signs with its key. So reading only stores what
has arrived, and the reactor takes one step after each round, when the replies of that round are sent. However many
clients shake hands, a request waits for one step at most.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext
from typing import Final, Protocol, Self

from trimq.remoting.runtime.address_key import address_key
from trimq.remoting.runtime.clock import CoarseTime
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.unsecured import Unsecured
from trimq.remoting.tls.certificates import Certificate, Side
from trimq.remoting.tls.config import TlsConfig, TlsMode
from trimq.remoting.tls.tls_socket import TlsSocket

CLOSED_AT_ONCE: Final = 50
"""Late handshakes closed before other tasks may run."""


class ServerContexts(Protocol):
    """What TlsContexts is for a server's ports."""

    @property
    def mode(self) -> TlsMode:
        """What the ports do."""
        ...

    @property
    def server(self) -> SSLContext | None:
        """The context for new connections; None without a certificate."""
        ...

    @property
    def certificates(self) -> Mapping[Side, Certificate]:
        """What the certificates in use say."""
        ...


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a reactor's ports: the contexts, the most unfinished handshakes, and the seconds that each may take."""

    contexts: ServerContexts
    max_handshakes: int = 1024
    handshake_timeout: float = 10.0

    @classmethod
    def of(cls, contexts: ServerContexts, config: TlsConfig) -> Self:
        """With the limits given by a configuration."""
        return cls(contexts, config.tls_max_handshakes, config.tls_handshake_timeout_seconds)

    @property
    def is_on(self) -> bool:
        """Whether the first byte of a connection decides. Otherwise the ports are plain, at no cost."""
        mode = self.contexts.mode
        return mode is TlsMode.ENFORCING or (mode is TlsMode.PERMISSIVE and self.contexts.server is not None)


class _Handshake(Unsecured):
    """Stands in for the socket of a connection until its handshake has ended: it stores what arrives for the next step.

    ``enqueue`` puts the connection into the queue, if it is not there yet. ``answered``: a step was taken.
    """

    __slots__ = ("_enqueue", "answered", "began_at", "tls")

    def __init__(self, tls: TlsSocket, began_at: float, enqueue: Callable[[], None]) -> None:
        super().__init__(tls.raw)
        self.tls = tls
        self.began_at = began_at
        self.answered = False
        self._enqueue = enqueue

    def recv_into(self, _: memoryview) -> int:
        """Take what has arrived for the next step. Always raises: BlockingIOError, or OSError if the peer is gone."""
        try:
            if self.tls.fill():
                self._enqueue()
        except ConnectionResetError:
            # What waits for the next step may end the handshake, with requests behind it. The socket reports the end
            # again. Before the first answer nothing can: a step would only cost.
            if not (self.answered and self.tls.arrived):
                raise
        raise BlockingIOError

    def close(self) -> None:
        """Close the plain socket, and refer to the connection no more (see FirstBytes)."""
        super().close()
        del self._enqueue


class Handshakes:
    """The unfinished handshakes. ``queue`` has the connections for which a step can be taken, each once.

    A closed connection leaves both at once: clients that begin handshakes and close would fill a queue that is emptied
    by one in each round. When the most are unfinished, the host with the most of them loses one for a client of another
    host: a host that begins handshakes and does not go on cannot keep the others away. All addresses of an
    IPv6 network of 64 bits count as one host.
    """

    def __init__(
        self,
        tls: ServerTls,
        stats: ReactorStats,
        time: CoarseTime,
        *,
        watch: Callable[[Connection], None],
        continue_later: Callable[[Connection], None],
    ) -> None:
        """``watch`` updates what the selector watches; ``continue_later`` has a connection read without an event."""
        self._contexts = tls.contexts
        self.requires_tls = tls.contexts.mode is TlsMode.ENFORCING
        self._most = tls.max_handshakes
        self._timeout = tls.handshake_timeout
        self._stats = stats
        self._time = time
        self._watch = watch
        self._continue_later = continue_later
        self._unfinished: dict[Connection, _Handshake] = {}  # in the order of their beginning
        self._by_host: dict[str, dict[Connection, None]] = {}  # in the same order
        self.queue: OrderedDict[Connection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unfinished)

    def refuse_plain(self, conn: Connection) -> None:
        """Close a connection whose first byte is not that of TLS. Nothing of it is decoded or answered."""
        self._stats.plain_refused += 1
        conn.close("it began without TLS, and tls.server.mode is enforcing", broken=True)

    def begin(self, conn: Connection, raw: Unsecured, first: memoryview) -> None:
        """Begin the handshake of a connection whose ``first`` bytes are those of TLS, or close it."""
        context = self._contexts.server
        if context is None:
            self._stats.handshakes_refused += 1
            conn.close("TLS is not possible: the server has no certificate (tls.server.certPath)")
            return
        if len(self._unfinished) >= self._most:
            self._stats.handshakes_refused += 1
            refused = self._one_too_many(conn)
            if refused is not conn:
                self._ended(refused)
                refused.tls = None
            refused.close(f"{self._most} TLS handshakes are unfinished (tlsMaxHandshakes)")
            if refused is conn:
                return
        conn.tls = TlsSocket(raw.raw, context, server_side=True, first=first)
        conn.sock = self._unfinished[conn] = _Handshake(conn.tls, self._time.now, partial(self._enqueue, conn))
        self._by_host.setdefault(address_key(conn.peer[0]), {})[conn] = None
        self._enqueue(conn)
        conn.active_at = self._time.now

    def _one_too_many(self, conn: Connection) -> Connection:
        """The oldest of the host with the most unfinished handshakes; ``conn`` itself if its host is one of those."""
        largest = max(self._by_host.values(), key=len)
        own = self._by_host.get(address_key(conn.peer[0]), ())
        return conn if len(own) >= len(largest) else next(iter(largest))

    def _enqueue(self, conn: Connection) -> None:
        self.queue[conn] = None

    def step(self) -> None:
        """Take the next step of one handshake."""
        conn, _ = self.queue.popitem(last=False)
        handshake = self._unfinished[conn]
        handshake.answered = True
        tls = handshake.tls
        try:
            established = tls.do_handshake()
        except OSError as error:
            conn.close(str(error), broken=True)
            return
        if established:
            self._ended(conn)
            self._stats.handshakes += 1
            self._stats.tls_connections += 1
            conn.sock = tls
            conn.active_at = self._time.now
            tls.on_left = partial(self._continue_later, conn)
            if tls.has_bytes:
                self._continue_later(conn)
        if tls.unsent:
            self._watch(conn)

    def overdue(self, now: float) -> list[Connection]:
        """The next connections, CLOSED_AT_ONCE at most, whose handshake takes too long."""
        late: list[Connection] = []
        for conn, handshake in self._unfinished.items():
            if now - handshake.began_at < self._timeout or len(late) == CLOSED_AT_ONCE:
                break
            late.append(conn)
        return late

    def time_out(self, conn: Connection) -> None:
        """Close a connection whose handshake takes too long."""
        self._ended(conn)
        self._stats.handshakes_timed_out += 1
        conn.tls = None
        conn.close(f"the TLS handshake took more than {self._timeout:g} s", broken=True)

    def forget(self, conn: Connection) -> None:
        """Note that a connection is being closed."""
        if conn in self._unfinished:
            self._ended(conn)
            self._stats.handshakes_failed += 1
        elif conn.tls is not None:
            self._stats.tls_connections -= 1

    def _ended(self, conn: Connection) -> None:
        del self._unfinished[conn]
        self.queue.pop(conn, None)
        key = address_key(conn.peer[0])
        host = self._by_host[key]
        del host[conn]
        if not host:
            del self._by_host[key]
