"""The section on a bucket of bench/REPORT.md, made of the numbers in bench/results/bucket.json."""

from collections.abc import Iterator
from typing import Any, Final

_TIERS: Final = (
    ("upload8", "mib_s", "MiB/s uploaded, 8 queues"),
    ("upload8", "msg_s", "messages/s uploaded"),
    ("upload8", "s_since_start", "s from the start of the process until all were uploaded"),
    ("upload8", "broker_cpu_s", "s of processor time, broker since its start"),
    ("upload8", "server_cpu_s", "s of processor time, object server"),
    ("upload8", "anonymous_mib", "most anonymous memory of the broker, MiB"),
    ("upload1000", "mib_s", "MiB/s uploaded, 1,000 queues"),
    ("upload1000", "broker_cpu_s", "s of processor time, broker since its start"),
    ("upload1000", "server_cpu_s", "s of processor time, object server"),
    ("upload1000", "anonymous_mib", "most anonymous memory of the broker, MiB"),
    ("catchup1", "msg_s", "messages/s read by 1 consumer, objects as uploaded"),
    ("catchup8", "msg_s", "messages/s read by 8 consumers, objects as uploaded"),
    ("catchup8", "broker_cpu_s", "s of processor time, broker"),
    ("catchup8", "server_cpu_s", "s of processor time, object server"),
    ("catchup8", "anonymous_mib", "most anonymous memory of the broker, MiB"),
    ("joined1", "msg_s", "messages/s read by 1 consumer, after joins"),
    ("joined8", "msg_s", "messages/s read by 8 consumers, after joins"),
    ("joined8", "anonymous_mib", "most anonymous memory of the broker, MiB"),
    ("start", "s", "s from the start of the process to the first message"),
    ("start", "s_until_port", "s of it until it accepts connections"),
    ("cold", "ms_first", "ms to the first message of the first queue"),
    ("cold", "ms_median", "ms to the first message of a queue, median"),
)
_SENDS: Final = {
    "sends": "messages of 1 KiB, with the upload limit",
    "sendsmixed": "mixed messages, with the upload limit",
    "sendsmost": "messages of 1 KiB, as many as possible, no limit",
}


def bucket(numbers: dict[str, Any]) -> list[str]:
    """Uploads, catching up, first messages, sends beside uploads, and the restore, as far as they were measured."""
    cpus = f"The broker on processor {numbers['broker_cpu']}, versitygw on {numbers['server_cpu']}"
    text = [f"Medians of {numbers['rounds']} rounds, in turns. {cpus}, the load generator on all."]
    if "joined_share" in numbers:
        text.append(f"After joins {numbers['joined_share']:.0%} of the bytes were in joined objects.")
    rows = list(_tiers(numbers))
    if rows:
        text += ["", "| part | figure | POSIX files | bucket | bucket / POSIX |", "|---|---|--:|--:|--:|", *rows]
    rows = list(_sends(numbers))
    if rows:
        text += ["", "| sends | tier | messages/s without a tier | with it | meanwhile uploaded | ratio |"]
        text += ["|---|---|--:|--:|--:|--:|", *rows]
    if "restore" in numbers:
        text += ["", *_restore(numbers["restore"])]
    return text


def _tiers(numbers: dict[str, Any]) -> Iterator[str]:
    for part, figure, words in _TIERS:
        if part in numbers:
            posix, ours = (numbers[part][name][figure] for name in ("posix", "bucket"))
            ratio = f"{ours / posix:.2f}" if posix else ""
            yield f"| {part} | {words} | {posix:,} | {ours:,} | {ratio} |"


def _sends(numbers: dict[str, Any]) -> Iterator[str]:
    for part, words in _SENDS.items():
        found = numbers.get(part, {})
        for name, text in (("posix", "POSIX files"), ("bucket", "bucket")):
            if name in found:
                with_it = found[name]
                figures = f"{found['none']['msg_s']:,} | {with_it['msg_s']:,} | {with_it['uploaded_msg_s']:,}"
                yield f"| {words} | {text} | {figures} | {with_it['ratio']:.2f} |"


def _restore(found: dict[str, Any]) -> Iterator[str]:
    objects = " and ".join(f"{count} {kind}" for kind, count in sorted(found["objects"].items()))
    yield f"A broker of {found['gib']} GiB ({found['messages']:,} messages, {objects} objects) starts on an empty disk:"
    yield ""
    yield "| | s until it accepts connections | first message, s | last one, s | GET | LIST | PUT |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    begun, made = found["start"], found["mqstore"]
    requests = [" | ".join(f"{one[kind]:,.0f}" for kind in ("get", "list", "put")) for one in (begun, made)]
    times = f"{begun['s_until_port']:.2f} | {begun['s_first']:.2f} | {begun['s_last']:.2f}"
    yield f"| start; requests until there are no more | {times} | {requests[0]} |"
    times = f" | {made['s_first']:.2f} | {made['s_last']:.2f}"
    yield f"| after `mqstore tiered restore`, {made['s_command']:.2f} s; its requests | {times} | {requests[1]} |"
