"""What certificates say, and whether cipher suites fit a key: found by handshakes in memory.

The module ssl describes the certificates of peers only, and only verified ones; and it does not say the kind of a key.
"""

import contextlib
import enum
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trimq.remoting.tls import key_files, suites
from trimq.remoting.tls.key_files import KeyFileError, KeyPair, KeyPairPaths, Part, Verification

_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the module ssl does not name."""
_ROUNDS: Final = 8
"""More than the messages of a handshake in memory."""


class Side(enum.StrEnum):
    """Which certificate of a program: that of its ports, or the one that it shows to other servers."""

    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate and the others in its file, which are its chain, say.

    subject     whose certificate it is, such as "CN=localhost"
    own         when it begins and ends itself, in Unix seconds
    begins_at   when all of the file have begun, in Unix seconds
    expires_at  when the first of the file ends, in Unix seconds
    ends_first  the subject of that one
    """

    subject: str
    own: tuple[float, float]
    begins_at: float
    expires_at: float
    ends_first: str

    def is_valid(self, now: float) -> bool:
        """Whether it is valid itself at a time in Unix seconds: not all others of a file need be part of its chain."""
        begin, end = self.own
        return begin <= now < end


def describe(pair: KeyPair, paths: KeyPairPaths) -> Certificate:
    """What a server's certificate says, whatever the date; the pair must have been checked.

    Raises KeyFileError if it is none for servers.
    """
    try:
        return _described(pair, Side.SERVER)
    except (ssl.SSLError, ValueError) as error:
        raise KeyFileError(Part.CERT, paths.cert, f"a certificate that servers can use ({_reason(error)})") from None


def describe_client(pair: KeyPair, paths: KeyPairPaths) -> Certificate:
    """As ``describe``, for a client's certificate. It may be for servers only: not every server verifies it.

    Raises KeyFileError if it is for neither.
    """
    try:
        return _described(pair, Side.CLIENT)
    except (ssl.SSLError, ValueError) as error:
        with contextlib.suppress(ssl.SSLError, ValueError):
            return _described(pair, Side.SERVER)
        raise KeyFileError(Part.CERT, paths.cert, f"a certificate that clients can use ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    return getattr(error, "verify_message", "") or str(error)


def _described(pair: KeyPair, side: Side) -> Certificate:
    """What the other end of a handshake sees, which trusts this very certificate."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), _unverifying()
    key_files.load_pair(server, pair)
    if side is Side.SERVER:
        verifier = client
    else:
        verifier = server
        key_files.load_pair(client, pair)
    verifier.verify_mode = ssl.CERT_REQUIRED
    verifier.load_verify_locations(cadata=key_files.pem_text(pair.cert))
    verifier.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    ends = _shaken_hands(server, client)
    first: Any = ends[verifier is client].getpeercert()
    every = [first, *verifier.get_ca_certs()]
    ends_first = min(every, key=_end)
    return Certificate(
        _subject(first),
        (_begin(first), _end(first)),
        max(map(_begin, every)),
        _end(ends_first),
        _subject(ends_first),
    )


def _begin(found: Mapping[str, Any]) -> float:
    return ssl.cert_time_to_seconds(found["notBefore"])


def _end(found: Mapping[str, Any]) -> float:
    return ssl.cert_time_to_seconds(found["notAfter"])


def _subject(found: Mapping[str, Any]) -> str:
    return ",".join(f"{_SHORT.get(name, name)}={value}" for part in found["subject"] for name, value in part)


_SHORT: Final = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "localityName": "L",
    "stateOrProvinceName": "ST",
}


def suites_problem(pair: KeyPair, protocols: str, ciphers: str) -> str:
    """What was expected of a server's ``tls.ciphers``; empty if they fit its key. The pair must have been checked.

    If a list has cipher suites of TLS 1.2, one of them has to fit, even if TLS 1.3 works: who has listed them wants
    clients of TLS 1.2 to be served.
    """
    context = key_files.server_context(pair, Verification(ssl.CERT_NONE), protocols, ciphers)
    if context.minimum_version != ssl.TLSVersion.TLSv1_2 or all(map(suites.is_newest, suites.names(ciphers))):
        return ""
    if _suite(context):
        return ""
    fitting = _suite(key_files.server_context(pair, Verification(ssl.CERT_NONE)))
    if not fitting:  # a kind of key that is for TLS 1.3 only
        return "cipher suites of TLS 1.3 only: the key of tls.server.certPath fits none of TLS 1.2"
    return (
        f"a cipher suite of TLS 1.2 that fits the key of tls.server.certPath, such as {suites.standard_name(fitting)}"
    )


def _suite(server: ssl.SSLContext) -> str:
    """OpenSSL's name of the cipher suite that a client of TLS 1.2 gets; empty if there is none for it."""
    client = _unverifying()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        chosen = _shaken_hands(server, client)[1].cipher()
    except ssl.SSLError:
        return ""
    assert chosen is not None
    return chosen[0]


def _unverifying() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _shaken_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Server's and client's end after a handshake in memory. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = server.wrap_bio(there, back, server_side=True), client.wrap_bio(back, there)
    for _ in range(_ROUNDS):
        for end in reversed(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends
