"""The section on TLS and access control of bench/REPORT.md, made of the numbers in bench/results/security.json."""

from collections.abc import Iterator
from typing import Any, Final

from bench.security import FLOORS, PAIRS, missed

NAMES: Final = {
    "apache": "Apache's",
    "plain": "ours",
    "apache-acl": "Apache's, access control",
    "acl": "ours, access control",
    "apache-tls": "Apache's, TLS",
    "tls": "ours, TLS",
    "tls-acl": "ours, TLS and access control",
    "python-plain": "ours, without the native extension",
    "python-acl": "ours, access control, without the native extension",
}


def security(numbers: dict[str, Any]) -> list[str]:
    """Throughput with TLS and access control, ratios with their floors, connections, memory, and the SDK."""
    text = [
        f"Medians of {numbers['rounds']} rounds of {numbers['seconds']} s. All brokers of a row took turns; those that",
        "are not measured are paused. TLS 1.3 with ECDSA P-256. With access control, a user with four policies signs",
        "all requests. Ratios are medians of those of single rounds.",
    ]
    parts = (("rows", _loads), ("connections", _connections), ("memory", _memory), ("sdk", _sdk))
    for part, lines in parts:
        if part in numbers:
            text += ["", *lines(numbers)]
    return [*text, "", *(f"- **{line}**" for line in missed(numbers))]


def _loads(numbers: dict[str, Any]) -> Iterator[str]:
    rows = numbers["rows"]
    for title, figure, form in (("messages/s", "msg_s", ",.0f"), ("p99 ms", "p99_ms", ".2f")):
        yield f"| {title} | " + " | ".join(rows) + " |"
        yield "|---|" + "--:|" * len(rows)
        for name, words in NAMES.items():
            yield f"| {words} | " + " | ".join(f"{found[name][figure]:{form}}" for found in rows.values()) + " |"
        yield ""
    yield "The throughput of one broker divided by that of another one; bold below its floor:"
    yield ""
    yield "| | | " + " | ".join(rows) + " |"
    yield "|---|---|" + "--:|" * len(rows)
    for one, other in PAIRS:
        cells = []
        for row in rows:
            reached, floor = numbers["ratios"][row][f"{one} / {other}"], FLOORS.get((row, one, other))
            cell = f"**{reached:.2f}**" if floor is not None and reached < floor else f"{reached:.2f}"
            cells.append(cell if floor is None else f"{cell} (floor {floor:g})")
        yield f"| {NAMES[one]} | / {NAMES[other]} | " + " | ".join(cells) + " |"


def _connections(numbers: dict[str, Any]) -> Iterator[str]:
    yield "New connections, each with one request, 16 at a time; those with TLS have a full handshake:"
    yield ""
    yield "| broker | a second | p99 ms |"
    yield "|---|--:|--:|"
    for name, found in numbers["connections"].items():
        if name != "raw":
            yield f"| {NAMES[name]} | {found['msg_s']:,.0f} | {found['p99_ms']:.2f} |"


def _memory(numbers: dict[str, Any]) -> Iterator[str]:
    for name, found in numbers["memory"].items():
        yield (
            f"- {NAMES[name]}: anonymous memory {found['before_mib']:.1f} MiB,"
            f" {found['idle_mib']:.1f} with {found['connections']:,} idle connections"
            f" ({found['kib_each']:.1f} KiB each), {found['after_mib']:.1f} after they were closed"
        )


def _sdk(numbers: dict[str, Any]) -> Iterator[str]:
    yield "Our SDK with 64 sends in flight; the ratio is that to requests without signatures, to an open broker:"
    yield ""
    yield "| load | requests | messages/s | ratio | us of the client's CPU a message |"
    yield "|---|---|--:|--:|--:|"
    for row, by_how in numbers["sdk"]["rows"].items():
        base = next(iter(by_how.values()))["msg_s"]
        for how, found in by_how.items():
            yield f"| {row} | {how} | {found['msg_s']:,.0f} | {found['msg_s'] / base:.2f} | {found['cpu_us']:.1f} |"
