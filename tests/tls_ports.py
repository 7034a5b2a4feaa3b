"""What a port of a server accepts: TLS, plain connections, or both."""

import ssl

import trio

from tests.tls_certificates import Certificates, KeyPair
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode


def tls_keys(certificates: Certificates, mode: str = "permissive", pair: KeyPair | None = None) -> dict[str, str]:
    """The keys of a server with a certificate."""
    pair = pair or certificates.server
    return {
        "tls.server.mode": mode,
        "tls.server.certPath": str(pair.cert),
        "tls.server.keyPath": str(pair.key),
        "tls.client.trustCertPath": str(certificates.ca),
    }


async def answers(address: tuple[str, int], code: int, context: ssl.SSLContext | None) -> bool:
    """Whether a request gets an answer, over TLS if there is a ``context``. False: the connection was closed."""
    stream: trio.abc.Stream = await trio.open_tcp_stream(*address)
    if context is not None:
        stream = trio.SSLStream(stream, context, server_hostname=address[0], https_compatible=True)
    async with stream:
        try:
            await stream.send_all(encode(RemotingCommand.request(code)))
            decoder = FrameDecoder()
            while data := await stream.receive_some(65536):
                for _ in decoder.feed(bytes(data)):
                    return True
        except trio.BrokenResourceError:
            pass
        return False


async def accepts(address: tuple[str, int], code: int, certificates: Certificates) -> tuple[bool, bool]:
    """Whether a port answers over TLS, and in plain."""
    return await answers(address, code, certificates.client_context()), await answers(address, code, None)


EXPECTED = {"permissive": (True, True), "enforcing": (True, False), "disabled": (False, True)}
"""What ``accepts`` returns for a server with a certificate."""
