"""What went wrong with TLS, in words that name the side that can correct it."""

import ssl
from typing import Final

_REASONS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other side requires a certificate and got none",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not trust the authority that signed this side's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side refused this side's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other side says that this side's certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the other side does not accept this side's certificate",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the other side accepts none of the offered ciphers, or wants a certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other side accepts none of the offered TLS versions",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other side sent no certificate, and one is required",
    "UNSUPPORTED_PROTOCOL": "no common TLS version: 1.2 or 1.3 is required",
    "VERSION_TOO_LOW": "no common TLS version: 1.2 or 1.3 is required",
    "NO_SHARED_CIPHER": "no common cipher",
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS",
    "HTTP_REQUEST": "the other side sent an HTTP request",
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "a record was changed on the way",
    "RECORD_LAYER_FAILURE": "a record was changed on the way",  # of OpenSSL 3.2 and later
}


def text_of(error: ssl.SSLError) -> str:
    """The reason of a failed handshake or of a broken record."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other side was refused: {error.verify_message}"
    if error.reason in _REASONS:
        return _REASONS[error.reason]
    return (error.reason or str(error) or type(error).__name__).lower().replace("_", " ")


_ENDS_OF_REFUSALS: Final = (
    "CERTIFICATE_REQUIRED",
    "BAD_CERTIFICATE",
    "UNSUPPORTED_CERTIFICATE",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_UNKNOWN",
    "UNKNOWN_CA",
    "ACCESS_DENIED",
)


def is_certificate_refused(error: OSError) -> bool:
    """Whether a connection failed with an alert that says that this side's certificate is missing or not accepted."""
    cause = error.__cause__
    reason = cause.reason if isinstance(cause, ssl.SSLError) else None
    return reason is not None and "_ALERT_" in reason and reason.endswith(_ENDS_OF_REFUSALS)
