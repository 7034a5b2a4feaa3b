"""The TLS handshake of a client, over a socket that is connected already."""

import socket
import ssl
from typing import Final

from trimq.remoting.client.client_socket import ClientNetwork
from trimq.remoting.tls.client_contexts import ClientTls, with_problem
from trimq.remoting.tls.key_files import KeyFileError
from trimq.remoting.tls.tls_socket import TlsSocket
from trimq.remoting.tls.tls_texts import text_of

_UNTRUSTED: Final = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's X509_V_ERR codes of a chain that ends at no trusted certificate."""
_OTHER_HOST: Final = frozenset({62, 64})
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})


class TlsError(ConnectionError):
    """There is no TLS connection. The text says why, and what to do."""


async def secured(sock: socket.socket, host: str, tls: ClientTls, network: ClientNetwork) -> TlsSocket:
    """Do the handshake, and verify that the server is ``host``, as far as ``tls`` wants that.

    Raises TlsError, and OSError of the socket, which is closed then, as after a cancellation.
    """
    try:
        context = await tls.context()
        found = TlsSocket(sock, context, server_side=False, server_hostname=host.partition("%")[0])
        await _shake_hands(found, network)
    except KeyFileError as error:
        sock.close()
        raise TlsError(f"a file for TLS cannot be used: {error}") from None
    except ConnectionResetError:
        sock.close()
        text = (
            "the server closed the connection within the TLS handshake: it may not serve TLS, for example because it "
            "has no certificate, or it may require one of clients"
        )
        raise TlsError(with_problem(text, tls.problem)) from None
    except ConnectionAbortedError as error:
        sock.close()
        raise TlsError(with_problem(_reason(error, host, tls), tls.problem)) from None
    except ValueError as error:  # a host that can be in no certificate
        sock.close()
        raise TlsError(f"{host!r} is no name of a server with TLS: {error}") from None
    except BaseException:
        sock.close()
        raise
    return found


async def _shake_hands(sock: TlsSocket, network: ClientNetwork) -> None:
    readable = network.readable(sock.raw)
    try:
        while not sock.do_handshake() or sock.unsent:
            if sock.unsent:
                await network.wait_writable(sock.raw)
            else:
                await readable.wait()
                sock.fill()
    finally:
        readable.close()


def _reason(error: OSError, host: str, tls: ClientTls) -> str:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        code, text = cause.verify_code, cause.verify_message
        if code in _UNTRUSTED:
            return (
                f"the server's certificate is not trusted ({text}): none of the CA certificates signs it; trusted are "
                f"{tls.trusted}"
            )
        if code in _OTHER_HOST:
            return (
                f"the server's certificate is not for {host} ({text}): connect to a name or address that is in it "
                f"(subjectAltName), or get one that contains {host}"
            )
        return f"the server's certificate was refused: {text}"
    if isinstance(cause, ssl.SSLError):
        if cause.reason in _NO_TLS:
            return "the server does not speak TLS on this port"
        return f"the TLS handshake failed: {text_of(cause)}"
    return str(error)
