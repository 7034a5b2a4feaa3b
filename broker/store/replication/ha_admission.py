"""Proofs on connections of replication: before the first report, master and slave show who they are.

By a secret that both know, by TLS with certificates of both, or both. Without any of them nothing here is used. What
is sent for the secret: protocol/ha_proof.py.
"""

import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import structlog
import trio

from trimq.broker.store.replication.ha_client import UnprovenMasterError
from trimq.protocol.auth.model import IPNetwork
from trimq.protocol.ha_proof import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    HELLO,
    PROOF_BYTES,
    HAProofError,
    MasterProof,
    SlaveProof,
)
from trimq.remoting.config.networks import is_in
from trimq.remoting.tls.client_contexts import with_problem
from trimq.remoting.tls.key_files import KeyFileError

_log = structlog.get_logger(__name__)

PROOF_SECONDS: Final = 5.0
_TLS: Final = b"\x16"
"""The first byte of a TLS handshake. Reports, greetings and RocketMQ's handshakes begin with another one."""

OpenStream = Callable[[str, int], Awaitable[trio.abc.Stream]]


class BegunStream(trio.abc.Stream):
    """A stream of which some bytes have been received already: they come first."""

    def __init__(self, stream: trio.abc.Stream, begin: bytes) -> None:
        self._stream = stream
        self._begin = begin

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """The next bytes; none at the end."""
        if self._begin:
            await trio.lowlevel.checkpoint()
            count = len(self._begin) if max_bytes is None else max_bytes
            data, self._begin = self._begin[:count], self._begin[count:]
            return data
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Return when there is room to send."""
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close it."""
        await self._stream.aclose()


class ClientContext(Protocol):
    """The part of ClientTls that is used here. ``problem``: why changed files are not in use; empty if they are."""

    problem: str

    def new_problem(self) -> str:
        """``problem`` if it is to be logged."""
        ...

    async def context(self) -> ssl.SSLContext:
        """The context for a new connection. Raises an exception if its files cannot be used."""
        ...


class HATls(NamedTuple):
    """The contexts of both sides; both verify the other one. ``server`` returns that of new connections."""

    server: Callable[[], ssl.SSLContext | None]
    client: ClientContext


class HAAdmission:
    """Proofs of both sides. ``without_proof``: the addresses of RocketMQ's brokers, which cannot prove anything."""

    def __init__(
        self,
        keys: Mapping[bytes, bytes],
        name: str,
        without_proof: Sequence[IPNetwork] = (),
        *,
        tls: HATls | None = None,
        silence: float = 20.0,
    ) -> None:
        """``keys`` and ``name``: see protocol/ha_proof.py; without keys ``tls`` alone is the proof.

        ``silence``: RocketMQ's slave reports in this time, in seconds.
        """
        self._keys = keys
        self._name = name
        self._without_proof = without_proof
        self._tls = tls
        self._silence = silence

    def may_prove_nothing(self, address: str) -> bool:
        """Whether a broker at an IP address need not prove anything."""
        return is_in(address, self._without_proof)

    async def of_slave(self, stream: trio.abc.Stream, address: str) -> trio.abc.Stream:
        """For a master: the stream of a slave that is let in.

        Raises HAProofError: also if the slave has proved nothing after 5 s. Raises what the stream raises.
        """
        exempt = self.may_prove_nothing(address)
        # RocketMQ's slave may send its first report some seconds after it has connected.
        with trio.move_on_after(self._silence if exempt else PROOF_SECONDS):
            begin = bytes(await stream.receive_some(len(HELLO)))
            if self._tls is not None and (begin[:1] == _TLS or not exempt):
                if begin[:1] != _TLS:
                    raise HAProofError("the slave connects without TLS (haTls)")
                stream = await _secured(BegunStream(stream, begin), self._tls.server())
                if not self._keys:
                    return stream
                exempt = False
                begin = bytes(await stream.receive_some(len(HELLO)))
            if exempt and (not self._keys or not HELLO.startswith(begin[:1] or b"\0")):
                return BegunStream(stream, begin)
            if not begin or not HELLO.startswith(begin):
                raise HAProofError("the slave proves nothing: set haSecretFile there, or haAllowedWithoutProof here")
            if await _exactly(stream, len(HELLO), begin) != HELLO:
                raise HAProofError("the slave sends neither a report nor a greeting")
            proof = MasterProof(self._keys, self._name)
            await stream.send_all(proof.challenge())
            await stream.send_all(proof.verify(await _exactly(stream, ANSWER_BYTES)))
            return stream
        raise HAProofError("the slave has proved nothing in time")

    async def of_master(self, stream: trio.abc.Stream) -> None:
        """For a slave: return when the master has proved itself, and has let this slave in.

        Raises HAProofError: also if the master is silent for 5 s. Raises what the stream raises.
        """
        with trio.move_on_after(PROOF_SECONDS):
            proof = SlaveProof(self._keys, self._name)
            await stream.send_all(HELLO)
            await stream.send_all(proof.answer(await _exactly(stream, CHALLENGE_BYTES)))
            proof.verify(await _exactly(stream, PROOF_BYTES))
            return
        raise HAProofError("the master does not prove itself: set haSecretFile there, or haAllowedWithoutProof here")

    def proving(self, open_stream: OpenStream, peer_of: Callable[[trio.abc.Stream], str]) -> OpenStream:
        """``open_stream`` whose streams are those of masters that have proved themselves.

        Raises UnprovenMasterError if one does not. Raises what ``open_stream`` raises.
        """

        async def opened(host: str, port: int) -> trio.abc.Stream:
            stream = await open_stream(host, port)
            try:
                if self._without_proof and self.may_prove_nothing(peer_of(stream)):
                    return stream
                return await self._proved(stream, host)
            except BaseException as error:
                await trio.aclose_forcefully(stream)
                if isinstance(error, HAProofError | KeyFileError):
                    raise UnprovenMasterError(str(error)) from error
                raise

        return opened

    async def _proved(self, stream: trio.abc.Stream, host: str) -> trio.abc.Stream:
        if self._tls is not None:
            stream = await self._over_tls(stream, host, self._tls.client)
        if self._keys:
            await self.of_master(stream)
        return stream

    async def _over_tls(self, stream: trio.abc.Stream, host: str, client: ClientContext) -> trio.abc.Stream:
        found = None
        try:
            with trio.move_on_after(PROOF_SECONDS):
                found = await _secured(stream, await client.context(), host)
        except HAProofError as error:
            raise HAProofError(with_problem(str(error), client.problem)) from None
        finally:  # the former files may be why it fails
            problem = client.new_problem()
            if problem:
                _log.warning("tls_reload_failed", reason=problem, address=host)
        if found is None:
            raise HAProofError("the master does not answer the TLS handshake: set haTls there")
        return found


async def _secured(
    stream: trio.abc.Stream, context: ssl.SSLContext | None, host: str | None = None
) -> trio.SSLStream[trio.abc.Stream]:
    """The stream after a handshake in which each side has verified the other. ``host``: for a client.

    Raises HAProofError.
    """
    if context is None:
        raise HAProofError("this broker has no certificate for TLS")
    found = trio.SSLStream(stream, context, server_hostname=host, server_side=host is None)
    try:
        await found.do_handshake()
    except trio.BrokenResourceError as error:
        reason = error.__cause__ or error
        raise HAProofError(f"no TLS connection: {reason}") from None
    # A server's context may let clients in that have no certificate.
    if not found.getpeercert(binary_form=True):
        raise HAProofError("the slave has no certificate (tls.client.certPath)")
    return found


async def _exactly(stream: trio.abc.Stream, count: int, begin: bytes = b"") -> bytes:
    """``count`` bytes, of which ``begin`` was received already. Raises HAProofError if the peer disconnects."""
    while len(begin) < count:
        data = await stream.receive_some(count - len(begin))
        if not data:
            raise HAProofError("the peer has disconnected, as a broker does that does not get the proof it wants")
        begin += data
    return begin
