"""Apache's SQL92 filter as a referee: what it accepts, and what it says of messages.

``python -m tests.interop.harness.referee`` records its verdicts on some cases for the tests that have no JVM.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.interop.harness import partners
from tests.interop.harness.processes import Process, ended_afterwards
from tests.protocol.sql_cases import RECORDED, VERDICTS, Case, cases, digest


class Referee:
    """The filter in a JVM of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process
        child = process.start(piped=True)
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the referee's pipes are missing")
        self._requests = child.stdin
        self._answers = child.stdout

    def judge(self, cases: Sequence[Case]) -> list[str | None]:
        """For each case None if it is refused, else a letter a message: T(rue), F(alse), N(ull), E(rror)."""
        line = json.dumps([one._asdict() for one in cases])
        self._requests.write(line.encode() + b"\n")
        self._requests.flush()
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"the referee ended:\n{self.process.tail()}")
        results: list[str | None] = json.loads(answer)
        assert len(results) == len(cases)
        return results

    def finish(self) -> None:
        self._requests.close()
        self.process.wait_for_exit()
        self._answers.close()


@contextmanager
def running_referee(directory: Path) -> Iterator[Referee]:
    argv = [
        partners.tool("java"),
        "-Xmx256m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        f"-Duser.home={directory}",
        "-cp",
        partners.filter_referee(),
        "partners.FilterReferee",
    ]
    process = Process("referee", argv, directory)
    with ended_afterwards(process):
        referee = Referee(process)
        yield referee
        referee.finish()


def record(referee: Referee) -> dict[str, str]:
    """What ``VERDICTS`` has to contain: by seed and checksum of the cases, the verdicts ("-": refused)."""
    return {
        f"{seed}:{digest(cases(seed))}": " ".join(one or "-" for one in referee.judge(cases(seed))) for seed in RECORDED
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, running_referee(Path(place)) as running:
        VERDICTS.write_text(json.dumps(record(running), indent=0) + "\n", encoding="utf-8")
