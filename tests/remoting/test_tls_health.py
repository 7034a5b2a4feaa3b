"""The note about the certificate, and its metrics."""

from dataclasses import dataclass

import pytest

from trimq.remoting.http.metrics import reactor_families, text_of
from trimq.remoting.http.tls_health import certificate_notes
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.limits import ReactorStats

DAY = 86400
NOW = 1_700_000_000


@dataclass
class Certificate:
    expires_at: float | None
    subject: str = "CN=x"


@pytest.mark.parametrize(
    ("left", "code", "text"),
    [
        (None, None, ""),
        (30 * DAY + 1, None, ""),
        (30 * DAY, "tls_certificate_ends", "the certificate CN=x ends in 30.0 days: "),
        (1, "tls_certificate_ends", "the certificate CN=x ends in 0.0 days: "),
        (0, "tls_certificate_expired", "the certificate CN=x has expired 0.0 days ago: "),
        (-3 * DAY, "tls_certificate_expired", "the certificate CN=x has expired 3.0 days ago: "),
    ],
)
def test_the_note(left: float | None, code: str | None, text: str) -> None:
    certificate = Certificate(None if left is None else NOW + left)
    notes = list(certificate_notes(certificate, ManualClock(NOW * 1000), 30))
    assert [note.code for note in notes] == ([code] if code else [])
    assert all(note.text.startswith(text) for note in notes)


def test_the_metrics() -> None:
    stats = ReactorStats(
        tls_connections=1,
        handshakes=2,
        handshakes_failed=3,
        handshakes_refused=4,
        handshakes_timed_out=5,
        plain_refused=6,
    )
    names = (
        "trimq_tls_connections",
        "trimq_tls_handshakes_total",
        "trimq_tls_handshakes_failed_total",
        "trimq_tls_handshakes_refused_total",
        "trimq_tls_handshakes_timed_out_total",
        "trimq_plain_connections_refused_total",
    )
    page = "".join(text_of(family) for family in reactor_families(stats))
    for value, name in enumerate(names, 1):
        assert f"\n{name} {value}.0\n" in page
    assert "expiry" not in page
    stats.certificate_expires_at = lambda: 1.5e9
    page = "".join(text_of(family) for family in reactor_families(stats))
    assert "\ntrimq_tls_certificate_expiry_timestamp_seconds 1.5e+09\n" in page
