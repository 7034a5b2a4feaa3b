"""Metrics of who may do what: whether the broker is open, and what it has refused."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from trimq.remoting.auth.users import Users
from trimq.remoting.http.metrics import counters, gauge

_REASONS = ("authentication", "replay", "plain", "authorization")


def access_families(users: Users | None) -> Iterator[Metric]:
    """``users`` is None while authentication is off."""
    yield gauge(
        "trimq_access_open",
        "1 while requests need no signature, so that anybody who reaches the port is administrator.",
        int(users is None),
    )
    refused = users.access.refused if users is not None else {}
    yield counters(
        "trimq_access_refused_total",
        "Requests refused because of their signature (authentication), because they may be recorded ones (replay),"
        " because administration needs TLS (plain), or because no policy allows them (authorization).",
        ("reason",),
        {(reason,): refused.get(reason, 0) for reason in _REASONS},
    )
    yield gauge(
        "trimq_access_senders",
        "Clients whose requests are remembered, so that none is served twice.",
        users.access.replay_guard.senders if users is not None else 0,
    )
    yield gauge(
        "trimq_access_users", "Users that this server knows.", len(users.store.users) if users is not None else 0
    )
