"""A note for health when the certificate of a server ends soon, or has ended. The server is ready all the same."""

from collections.abc import Iterator
from typing import Final, Protocol

from trimq.remoting.http.health import Reason
from trimq.remoting.runtime.clock import Clock

CERTIFICATE_ENDS: Final = "tls_certificate_ends"
CERTIFICATE_EXPIRED: Final = "tls_certificate_expired"

_DAY: Final = 86400


class HasCertificate(Protocol):
    """What TlsContexts says of the certificate."""

    @property
    def expires_at(self) -> float | None:
        """When it ends, in Unix seconds; None without one."""
        ...

    @property
    def subject(self) -> str:
        """Whose it is."""
        ...


def certificate_notes(contexts: HasCertificate, clock: Clock, warning_days: int) -> Iterator[Reason]:
    """A note if the certificate ends within ``warning_days``, or has ended: clients that verify it do not connect."""
    end = contexts.expires_at
    if end is None:
        return
    left = end - clock.wall_ms() / 1000
    how = "put a new one at tls.server.certPath and its key at tls.server.keyPath: no restart is needed"
    if left <= 0:
        text = f"the certificate {contexts.subject} has expired {abs(left) / _DAY:.1f} days ago: {how}"
        yield Reason(CERTIFICATE_EXPIRED, text)
    elif left <= warning_days * _DAY:
        yield Reason(CERTIFICATE_ENDS, f"the certificate {contexts.subject} ends in {left / _DAY:.1f} days: {how}")
