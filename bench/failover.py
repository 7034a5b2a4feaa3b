"""How long no message can be stored when a master fails: a group of ours beside one of Apache's, in turns.

``python -m bench.failover [--rounds 20] [--json FILE]``. Three brokers each, with their defaults: ours with a
controller on an etcd of three members, Apache's with one controller. In each round the master of one group is killed
(SIGKILL: its connections end) or frozen (SIGSTOP, as a machine that is gone: nothing comes any more), and the other
brokers are asked to store a message, over and over, until one does; then the same with the other group. Our SDK's
producer sends to our group all the time: how much later it goes on is measured too. Needs a JDK, Maven and etcd.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.interop.harness import controllers, failover, probe
from tests.interop.harness.servers import Broker
from tests.interop.harness.wire import RefusedError, connected
from trimq.client.errors import RocketMQError
from trimq.client.message import Message
from trimq.client.sync import Producer

ROUNDS: Final = 20
TOPIC: Final = "Failover"
MEDIAN_SECONDS: Final = 4.0
WORST_SECONDS: Final = 8.0
SDK_SECONDS: Final = 1.0
"""The most that our group, and our SDK after it, may need."""
APACHES_DEFAULTS: Final = {
    "brokerHeartbeatInterval": "1000",
    "controllerHeartBeatTimeoutMills": "10000",
    "syncBrokerMetadataPeriod": "5000",
    "checkSyncStateSetPeriod": "5000",
    "haSendHeartbeatInterval": "5000",
}
APACHES_CONTROLLER: Final = {"scanNotActiveBrokerInterval": "5000", "scanInactiveMasterInterval": "5000"}


def stored_after(brokers: list[Broker], began: float, seconds: float = 60.0) -> float:
    """Seconds from ``began`` until one of the brokers has stored a message."""
    while time.monotonic() < began + seconds:
        for broker in brokers:
            host, _, port = broker.address.rpartition(":")
            try:
                with connected(host, int(port)) as wire:
                    wire.send(TOPIC, 0, b"x", {})
                    return time.monotonic() - began
            except (OSError, RefusedError):
                time.sleep(0.005)  # the peers share the machine with what is measured
    raise TimeoutError(f"no broker has stored a message in {seconds:g} s")


FAULTS: Final = ("killed", "frozen")


def failed(fault: str, master: Broker, brokers: list[Broker]) -> float:
    """Let a master fail. Returns the seconds until another broker stores; a frozen one goes on then."""
    others = [broker for broker in brokers if broker is not master]
    began = time.monotonic()
    if fault == "killed":
        master.kill()
        return stored_after(others, began)
    with master.process.frozen():
        return stored_after(others, began)


class Sender:
    """Our SDK's producer, which sends in a thread. ``acknowledged``: when it was answered last."""

    def __init__(self, namesrv: str) -> None:
        self.acknowledged = 0.0
        self._namesrv = namesrv
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    @contextmanager
    def sending(self) -> Iterator["Sender"]:
        """Send until the block ends."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(30)

    def _send(self) -> None:
        with Producer("failover", namesrv=self._namesrv) as producer:
            while not self._stop.is_set():
                try:
                    producer.send(Message(TOPIC, b"sdk"))
                    self.acknowledged = time.monotonic()
                except RocketMQError:
                    pass
                self._stop.wait(0.02)

    def goes_on(self, moment: float) -> float:
        """Seconds after ``moment`` at which a send is acknowledged."""
        while self.acknowledged <= moment:
            if time.monotonic() > moment + 60:
                raise TimeoutError("the SDK's producer has not gone on in 60 s")
            time.sleep(0.005)
        return self.acknowledged - moment


def measure(rounds: int, root: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Run both groups, and kill their masters in turns."""
    found: dict[str, list[float]] = {f"{name}_{fault}": [] for name in ("ours", "apache", "sdk") for fault in FAULTS}
    with (
        failover.running_group(root / "ours", controllers=1) as group,
        controllers.running_group(
            root / "apache",
            ["apache"] * 3,
            properties=APACHES_DEFAULTS,
            controller_properties=APACHES_CONTROLLER,
        ) as original,
    ):
        for master in (group.wait_for_master(), original.wait_for_master()):
            probe.create_topic(master.address, TOPIC, 1)
        with Sender(group.names.address).sending() as sender:
            sender.goes_on(time.monotonic())
            for number in range(rounds):
                fault = FAULTS[number % len(FAULTS)]
                master = group.wait_for_master()
                found[f"ours_{fault}"].append(failed(fault, master, group.brokers))
                found[f"sdk_{fault}"].append(sender.goes_on(time.monotonic()))
                if fault == "killed":
                    master.start()
                group.wait_for_all()
                other = original.wait_for_master()
                found[f"apache_{fault}"].append(failed(fault, other, original.brokers))
                if fault == "killed":
                    other.start()
                original.wait_for_set(*original.brokers)
                note(
                    ", ".join(
                        [
                            f"round {number + 1}: {fault}",
                            *(f"{row} {all_of[-1]:.2f} s" for row, all_of in found.items() if row.endswith(fault)),
                        ]
                    )
                )
    return {"rounds": rounds, **found}


def summary(numbers: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Median and worst of each row."""
    return {
        row: (statistics.median(all_of), max(all_of)) for row, all_of in numbers.items() if row != "rounds" and all_of
    }


def missed(numbers: dict[str, Any]) -> list[str]:
    """What was not reached."""
    texts = []
    for row, (median, worst) in summary(numbers).items():
        if row.startswith("ours") and median > MEDIAN_SECONDS:
            texts.append(f"{row}: the median is {median:.2f} s, above {MEDIAN_SECONDS:g} s")
        if row.startswith("ours") and worst > WORST_SECONDS:
            texts.append(f"{row}: the worst round is {worst:.2f} s, above {WORST_SECONDS:g} s")
        if row.startswith("sdk") and worst > SDK_SECONDS:
            texts.append(f"{row}: the SDK went on {worst:.2f} s later in a round, above {SDK_SECONDS:g} s")
        apaches = summary(numbers).get(row.replace("ours", "apache"))
        if row.startswith("ours") and apaches is not None and median > apaches[0]:
            texts.append(f"{row}: the median is {median:.2f} s, Apache's {apaches[0]:.2f} s")
    return texts


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trimq-failover-") as root:
        numbers = measure(arguments.rounds, Path(root), lambda text: print(text, file=sys.stderr, flush=True))
    for name, (median, worst) in summary(numbers).items():
        print(f"{name:16} median {median:6.2f} s, worst {worst:6.2f} s")
    for text in missed(numbers):
        print(f"MISSED: {text}")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
