"""The notes about certificates, and their metrics."""

from dataclasses import dataclass

import pytest

from trimq.remoting.http.metrics import reactor_families, text_of
from trimq.remoting.http.tls_health import certificate_notes
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.tls.certificates import Certificate, Side

DAY = 86400
NOW = 1_700_000_000


@dataclass
class Contexts:
    """Stands for TlsContexts."""

    certificates: dict[Side, Certificate]


@pytest.mark.parametrize(
    ("left", "code", "text"),
    [
        (30 * DAY + 1, None, ""),
        (30 * DAY, "ends", "ends in 30.0 days: "),
        (1, "ends", "ends in 0.0 days: "),
        (0, "expired", "has expired 0.0 days ago: "),
        (-3 * DAY, "expired", "has expired 3.0 days ago: "),
    ],
)
@pytest.mark.parametrize(
    ("side", "prefix"), [(Side.SERVER, "tls_certificate_"), (Side.CLIENT, "tls_client_certificate_")]
)
def test_the_notes(side: Side, prefix: str, left: int, code: str | None, text: str) -> None:
    for ends_first, name in (("CN=x", "CN=x"), ("CN=ca", "CN=ca in the chain of CN=x")):
        found = Contexts({side: Certificate("CN=x", (0, NOW + left), 0, NOW + left, ends_first)})
        notes = list(certificate_notes(found, ManualClock(NOW * 1000), 30))
        how = f"put a new one at tls.{side}.certPath and its key at tls.{side}.keyPath: no restart is needed"
        expected = [(f"{prefix}{code}", f"the certificate {name} {text}{how}")] if code else []
        assert [(note.code, note.text) for note in notes] == expected


def test_the_notes_of_certificates_that_are_not_valid_yet() -> None:
    certificate = Certificate("CN=x", (NOW + 3 * DAY, NOW + 9 * DAY), NOW + 3 * DAY, NOW + 9 * DAY, "CN=x")
    contexts = Contexts({Side.SERVER: certificate, Side.CLIENT: certificate})
    clock = ManualClock(NOW * 1000)
    server, client = certificate_notes(contexts, clock, 30)
    assert (server.code, client.code) == ("tls_certificate_not_valid_yet", "tls_client_certificate_not_valid_yet")
    begin = (
        "the certificate CN=x is not valid yet, but in 3.0 days: look at the clock of this machine, or put a new one"
    )
    assert server.text.startswith(f"{begin} at tls.server.certPath")
    assert client.text.startswith(f"{begin} at tls.client.certPath")
    clock.advance(3 * DAY)
    assert [note.code for note in certificate_notes(contexts, clock, 5)] == []
    assert [note.code for note in certificate_notes(Contexts({}), clock, 30)] == []


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
    stats.certificate_ends = lambda: {"server": 1.5e9, "client": 1.6e9}
    page = "".join(text_of(family) for family in reactor_families(stats))
    for side, end in (("server", "1.5e+09"), ("client", "1.6e+09")):
        assert f'\ntrimq_tls_certificate_expiry_timestamp_seconds{{side="{side}"}} {end}\n' in page
