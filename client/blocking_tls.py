"""TLS over a blocking socket, for Spark workers, which wait for one socket at a time and have no event loop."""

import socket
from contextlib import ExitStack

from trimq.remoting.tls.client_contexts import ClientTls, Tls
from trimq.remoting.tls.key_files import KeyFileError


def secured(sock: socket.socket, host: str, tls: Tls | bool) -> socket.socket:
    """An ssl.SSLSocket over ``sock``, whose handshake is done. ``sock`` is closed if that fails.

    Raises OSError.
    """
    with ExitStack() as unless_done:
        unless_done.callback(sock.close)
        try:
            context = ClientTls(tls if isinstance(tls, Tls) else Tls()).current()
        except KeyFileError as error:
            raise OSError(f"a file for TLS cannot be used: {error}") from None
        found = context.wrap_socket(sock, server_hostname=host)
        unless_done.pop_all()
        return found
