"""The sections on Spark of bench/REPORT.md, made of the numbers in bench/results/spark_*.json."""

from typing import Any, Final

FLOORS: Final = {"store": 0.7, "read": 0.4, "write": 0.4}
"""The least rate required of a source or sink, as a share of the most that PySpark's API can do."""


def topics(numbers: dict[str, Any]) -> list[str]:
    """A live broker and the sink, each with its ceiling."""
    text = [
        f"{numbers['rows']:,} rows with 1 KiB bodies, the broker on the same two cores.",
        "The ceiling of reading is a source of ready-made Arrow batches,",
        "that of writing a sink that drops its batches.",
        "",
        *_rates(numbers),
    ]
    again = numbers.get("memory in use")
    if again is not None:
        text += [
            "",
            f"Writing with all memory allocated but {again['left GiB']:g} GiB, as on a machine that has been in use.",
            f"A new page of a file costs {again['us a page']:.1f} us in this case, {numbers['us a page']:.1f} above;",
            "a row needs a third of a page (bench/memory_in_use.py).",
            "",
            *_rates(again),
        ]
    return text


def _rates(numbers: dict[str, Any]) -> list[str]:
    text = [
        "| | rows/s |",
        "|---|--:|",
        *[f"| {name} | {rate:,.0f} |" for name, rate in numbers["rows a second"].items()],
        "",
        "| | of the ceiling | floor | |",
        "|---|--:|--:|---|",
    ]
    for name, ratio in numbers["ratio"].items():
        text.append(_line(name, ratio, FLOORS.get(name)))
    return text


def _line(name: str, ratio: float, floor: float | None) -> str:
    mark = "slower" if floor is not None and ratio < floor else ""
    return f"| {name} | {ratio:.2f} | {'' if floor is None else floor} | {mark} |"


def store(numbers: dict[str, Any]) -> list[str]:
    """A store, relative to ready-made batches of the same rows."""
    text = [
        f"{numbers['rows']:,} rows with 1 KiB bodies, {numbers['topics']} topics; medians of {numbers['rounds']}.",
        "With one core, the whole process tree is limited to it.",
        "",
        "| | of the ceiling | floor | |",
        "|---|--:|--:|---|",
    ]
    for cores, found in sorted(numbers["cores"].items(), reverse=True):
        text.append(_line(f"{cores} core{'s' if cores != '1' else ''}", found["store / ready"], FLOORS["store"]))
    text += ["", "| rows/s | 2 cores | 1 core |", "|---|--:|--:|"]
    two, one = numbers["cores"]["2"], numbers["cores"]["1"]
    for name, rate in two["rows a second"].items():
        single = one["rows a second"].get(name)
        text.append(f"| {name} | {rate:,} | {'' if single is None else f'{single:,}'} |")
    return [
        *text,
        "",
        f"- two cores / one: {numbers['two cores / one']:.2f}",
        f"- one topic of {numbers['topics']}, through its queues: {two['one topic / all']:.1%} of the time for all",
        f"- the same by a scan of the log: {two['one topic, scanned / all']:.1%}",
    ]


def rebuild(numbers: dict[str, Any]) -> list[str]:
    """Queues and index of one log, built by Spark and by the broker's recovery."""
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in numbers["spark steps s"].items())
    equal = {True: "equal byte for byte", False: "NOT EQUAL"}
    return [
        f"{numbers['rows']:,} messages in a log of {numbers['log MiB']:,} MiB:",
        f"{numbers['units']:,} units in {numbers['queue files']} queue files,",
        f"{numbers['keys']:,} keys in {numbers['index files']} index files.",
        "",
        "| | seconds |",
        "|---|--:|",
        f"| `mqstore rebuild`, one core | {numbers['mqstore rebuild s']:.1f} |",
        f"| `rebuild` on Spark, {numbers['cores']} cores | {numbers['spark rebuild s']:.1f} |",
        f"| (the start of Spark before that) | {numbers['start of spark s']:.1f} |",
        "",
        f"- steps on Spark, in seconds: {steps}",
        f"- queue files: {equal[numbers['queue files equal']]}",
        f"- index files: header, slots and entries {equal[numbers['index files equal']]}",
    ]


SECTIONS: Final = (
    ("Topics on Spark", "spark_topics", topics),
    ("Stores on Spark", "spark_store", store),
    ("Rebuild on Spark", "spark_rebuild", rebuild),
)
"""The title of a section, the name of the file with its numbers, and the function that makes its text."""
