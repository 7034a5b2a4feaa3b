"""Timed messages: ``python -m bench.timers [--messages 1000000] [--load 2000] [--json FILE]``.

Prints one JSON object with three parts, each with a broker of its own:

- ``pending``: the broker's anonymous memory with that many messages in the timer, and without them; the rate at which
  they entered the timer, from a queue that had all of them.
- ``delivery``: the rate at which as many overdue messages are delivered.
- ``lateness``: milliseconds from TIMER_OUT_MS to the store time of the delivered message, for a tenth as many messages
  that are due all over a period, beside a load of ordinary sends, while all the others wait. A message comes after its
  slot has ended, so that it is never less than the precision. Its p99 may be the precision and LATE_MS more.

Exits with 1 if a limit is missed (`missed`).

``--command`` measures another broker, which needs ``{conf}`` for the path of its configuration file.
"""

import argparse
import json
import shlex
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.frames import BIG, escaped, frame, pull_fields, send_fields, unique
from bench.processes import BrokerProcess, our_command
from trimq.protocol.codes import RequestCode
from trimq.protocol.frame import decode
from trimq.protocol.message import decode_messages

TOPIC = "Timed"
BODY = b"x" * 200
PRECISION_MS = 1000
LATE_MS = 100
_WINDOW = 512
_LENGTH = struct.Struct(">I")
_LIMIT_SECONDS = 3600.0


class Client:
    """A blocking connection that keeps a number of requests in flight."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def send_all(self, frames: Iterator[bytes]) -> int:
        """Send requests, ``_WINDOW`` in flight; returns their number. Raises RuntimeError for a refusal."""
        sent = answered = 0
        more = True
        while more or answered < sent:
            part = []
            while more and sent - answered < _WINDOW:
                one = next(frames, None)
                if one is None:
                    more = False
                    break
                part.append(one)
                sent += 1
            if part:
                self._socket.sendall(b"".join(part))
            answered += self._answers()
        return sent

    def _receive(self) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the broker has closed the connection")
        self._rest += data

    def _answers(self) -> int:
        self._receive()
        count = at = 0
        while len(self._rest) - at >= 4:
            end = at + 4 + _LENGTH.unpack_from(self._rest, at)[0]
            if end > len(self._rest):
                break
            if b'"code":0,' not in self._rest[at : at + 200]:
                reply = decode(memoryview(self._rest)[at + 4 : end])
                raise RuntimeError(f"the broker answered {reply.code}: {reply.remark}")
            count += 1
            at = end
        self._rest = self._rest[at:]
        return count

    def ask(self, code: int, fields: str = "", body: bytes = b"") -> Any:
        """Send one request and return the reply."""
        self._socket.sendall(frame(code, 1, fields, body))
        while len(self._rest) < 4 or len(self._rest) < 4 + _LENGTH.unpack_from(self._rest)[0]:
            self._receive()
        end = 4 + _LENGTH.unpack_from(self._rest)[0]
        reply, self._rest = decode(memoryview(self._rest[4:end])), self._rest[end:]
        return reply

    def set(self, key: str, value: str) -> None:
        """Change the broker's configuration."""
        self.ask(RequestCode.UPDATE_BROKER_CONFIG, body=f"{key}={value}\n".encode())

    def timer(self) -> tuple[int, int]:
        """Messages that are not in the timer yet, and those that wait in it."""
        table = json.loads(bytes(self.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body))["table"]
        return int(table["timerOffsetBehind"]), int(table["timerCongestNum"])

    def end_of(self, topic: str) -> int:
        """The number of messages in queue 0 of a topic."""
        reply = self.ask(RequestCode.GET_MAX_OFFSET, f'"topic":"{topic}","queueId":"0"')
        return int(reply.ext_fields()["offset"]) if reply.code == 0 else 0

    def messages(self, topic: str) -> Iterator[tuple[int, int]]:
        """TIMER_OUT_MS and store time of the messages of queue 0."""
        offset = 0
        while True:
            reply = self.ask(RequestCode.PULL_MESSAGE, pull_fields(topic, 0, offset, 32))
            if reply.code != 0:
                return
            for message in decode_messages(bytes(reply.body)):
                yield int(message.properties["TIMER_OUT_MS"]), message.store_timestamp
            offset = int(reply.ext_fields()["nextBeginOffset"])


def timed_sends(count: int, due_ms: int, period_ms: int) -> Iterator[bytes]:
    """Sends of messages that are due from ``due_ms`` on, spread over a period, in no order."""
    for number in range(count):
        due = due_ms + number * 7919 % max(period_ms, 1)
        text = f"UNIQ_KEY\x01{unique(number)}\x02TIMER_DELIVER_MS\x01{due}\x02"
        yield frame(310, 1 + number, send_fields(TOPIC, 0, escaped(text)), BODY)


def ordinary_sends(client: Client, a_second: int, ended: threading.Event) -> None:
    """Send ordinary messages at a rate until ``ended``."""
    number, began = 0, time.monotonic()
    while not ended.wait(0.01):
        due = int((time.monotonic() - began) * a_second) - number
        client.send_all(
            frame(310, 1 + at, send_fields("Ordinary", 0, escaped(f"UNIQ_KEY\x01{unique(at)}\x02")), BODY)
            for at in range(number, number + due)
        )
        number += due


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


def until(condition: Any, pause: float = 0.02) -> float:
    """Wait for a condition; returns the seconds. Raises TimeoutError after an hour."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > _LIMIT_SECONDS:
            raise TimeoutError("the broker does not get there")
        time.sleep(pause)
    return time.perf_counter() - began


def measure_pending(broker: BrokerProcess, count: int) -> dict[str, Any]:
    """Memory and the rate into the timer."""
    client = Client(broker.port)
    idle = broker.memory_mib()
    client.set("timerStopEnqueue", "true")
    began = time.perf_counter()
    client.send_all(timed_sends(count, now_ms() + 6 * 3_600_000, 60 * 3_600_000))
    sending = time.perf_counter() - began
    queued = broker.memory_mib()
    client.set("timerStopEnqueue", "false")
    entering = until(lambda: client.timer()[0] == 0)
    waiting = client.timer()[1]
    client.close()
    return {
        "messages": waiting,
        "sends_a_second": round(count / sending),
        "enqueued_a_second": round(count / entering),
        "anonymous_mib_before": round(idle, 1),
        "anonymous_mib_stored": round(queued, 1),
        "anonymous_mib_pending": round(broker.memory_mib(), 1),
    }


def measure_delivery(broker: BrokerProcess, count: int) -> dict[str, Any]:
    """The rate of overdue messages, of slots with ten thousand messages each."""
    client = Client(broker.port)
    client.set("timerStopDequeue", "true")
    period = max(1, count // 10_000) * PRECISION_MS
    # Long enough ahead that all of them enter the timer before the first one is due.
    due = now_ms() + 10_000 + count // 6
    client.send_all(timed_sends(count, due, period))
    until(lambda: client.timer()[0] == 0)
    # Asking now and then keeps the connection, which the broker would close for being idle.
    until(lambda: client.timer()[0] == 0 and now_ms() > due + period + 2 * PRECISION_MS, 1.0)
    client.set("timerStopDequeue", "false")
    seconds = until(lambda: client.end_of(TOPIC) == count)
    client.close()
    return {"messages": count, "delivered_a_second": round(count / seconds)}


def measure_lateness(broker: BrokerProcess, pending: int, count: int, seconds: int, load: int) -> dict[str, Any]:
    """The lateness of ``count`` messages beside ``pending`` others and a load of ordinary sends."""
    client, other, ended = Client(broker.port), Client(broker.port), threading.Event()
    client.send_all(timed_sends(pending, now_ms() + 6 * 3_600_000, 60 * 3_600_000))
    until(lambda: client.timer()[0] == 0)
    client.send_all(timed_sends(count, now_ms() + 5_000 + count // 10, seconds * 1000))
    thread = threading.Thread(target=ordinary_sends, args=(other, load, ended))
    thread.start()
    try:
        until(lambda: client.end_of(TOPIC) == count, 0.1)
    finally:
        ended.set()
        thread.join()
    late = sorted(stored - out for out, stored in client.messages(TOPIC))
    client.close()
    other.close()
    share = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    found = {f"ms_{name}": late[min(int(len(late) * part), len(late) - 1)] for name, part in share.items()}
    sizes = {"messages": len(late), "pending": pending, "seconds": seconds, "load_a_second": load}
    return sizes | {"ms_least": late[0]} | found | {"ms_p99_limit": PRECISION_MS + LATE_MS}


def measure(command: list[str], *, messages: int, load: int, seconds: int) -> dict[str, Any]:
    """All three parts."""
    settings: dict[str, object] = {**BIG, "timerPrecisionMs": PRECISION_MS}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="trimq-timers-") as directory:
        root = Path(directory)
        with BrokerProcess("pending", command, root, **settings) as broker:
            found["pending"] = measure_pending(broker, messages)
        with BrokerProcess("delivery", command, root, **settings) as broker:
            found["delivery"] = measure_delivery(broker, messages)
        with BrokerProcess("lateness", command, root, **settings) as broker:
            found["lateness"] = measure_lateness(broker, messages, max(messages // 10, 100), seconds, load)
    return found


def missed(numbers: dict[str, Any]) -> list[str]:
    """The limits that these numbers miss, as texts."""
    late = numbers["lateness"]
    if late["ms_p99"] <= late["ms_p99_limit"]:
        return []
    return [f"TOO LATE: p99 is {late['ms_p99']:,} ms, at most {late['ms_p99_limit']:,} ms"]


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--load", type=int, default=2_000, help="ordinary sends a second")
    parser.add_argument("--seconds", type=int, default=60, help="period over which messages are due")
    parser.add_argument("--command", help="another broker; {conf} is the path of its configuration file")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    command = shlex.split(arguments.command) if arguments.command else our_command()
    result = measure(command, messages=arguments.messages, load=arguments.load, seconds=arguments.seconds)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if texts := missed(result):
        sys.exit("\n".join(texts))


if __name__ == "__main__":
    main()
