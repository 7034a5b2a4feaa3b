"""Notes for health about certificates that end soon, have ended, or are not valid yet: the server is ready anyhow."""

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from trimq.remoting.http.health import Reason
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.tls.certificates import Certificate, Side

_PREFIXES: Final = {Side.SERVER: "tls_certificate", Side.CLIENT: "tls_client_certificate"}
_DAY: Final = 86400


class HasCertificates(Protocol):
    """What TlsContexts says of the certificates."""

    @property
    def certificates(self) -> Mapping[Side, Certificate]:
        """Those in use."""
        ...


def certificate_notes(contexts: HasCertificates, clock: Clock, warning_days: int) -> Iterator[Reason]:
    """A note for each certificate that ends within ``warning_days``, has ended, or is not valid yet.

    Who verifies it does not connect then: clients of the ports, or servers that this program connects to.
    """
    now = clock.wall_ms() / 1000
    for side, found in contexts.certificates.items():
        left, prefix = found.expires_at - now, _PREFIXES[side]
        how = f"put a new one at tls.{side}.certPath and its key at tls.{side}.keyPath: no restart is needed"
        name = f"the certificate {found.ends_first}"
        if found.ends_first != found.subject:
            name += f" in the chain of {found.subject}"
        if left <= 0:
            yield Reason(f"{prefix}_expired", f"{name} has expired {abs(left) / _DAY:.1f} days ago: {how}")
        elif found.begins_at > now:
            text = f"the certificate {found.subject} is not valid yet, but in {(found.begins_at - now) / _DAY:.1f} days"
            yield Reason(f"{prefix}_not_valid_yet", f"{text}: look at the clock of this machine, or {how}")
        elif left <= warning_days * _DAY:
            yield Reason(f"{prefix}_ends", f"{name} ends in {left / _DAY:.1f} days: {how}")
