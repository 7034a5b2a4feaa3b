"""The requests a second that the reactor alone serves, and its processor time for each.

    python -m bench.reactor_echo [--seconds 3] [--rows 1x1,64x1,8x32] [--handler fixed|header|echo] [--body 1024]

A row is connections x requests in flight on each. The load comes from a child process. It sends ready-made
SEND_MESSAGE_V2 frames and only counts the bytes of replies, so that it uses as little as possible of a small machine.
Handlers: ``fixed`` returns ready-made bytes (transport and frame decoding alone), ``header`` also decodes the typed
header, ``echo`` returns the body through RemotingCommand.reply.
"""

import logging
import multiprocessing
import resource
import select
import socket
import time
from multiprocessing.connection import Connection as Pipe

import click
import structlog
import trio

from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.headers.send import SendMessageRequestHeaderV2
from trimq.remoting.server.reactor import Connection, HandlerTable, Outcome, Reactor, listen

EXT = {
    "a": "load",
    "b": "BenchmarkTest",
    "c": "TBW102",
    "d": "4",
    "e": "1",
    "f": "0",
    "g": "1700000000000",
    "h": "0",
    "i": "KEYS\x01k123456\x02UNIQ_KEY\x017F0000011F9018B4AAC2000000000000\x02TAGS\x01TagA\x02",
    "j": "0",
    "k": "false",
    "l": "0",
    "m": "false",
    "n": "broker-a",
}
REPLY_EXT = {"msgId": "7F00000100002A9F0000000000000000", "queueId": "1", "queueOffset": "123456"}


def sample(body: int) -> RemotingCommand:
    return RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, EXT, b"x" * body)


def handlers(kind: str, body: int) -> tuple[HandlerTable, int]:
    """The handler table, and the length of each reply."""
    fixed = encode(sample(body).reply(header=REPLY_EXT))

    def answer(_connection: Connection, _command: RemotingCommand) -> Outcome:
        return fixed

    def decode_header(_connection: Connection, command: RemotingCommand) -> Outcome:
        command.header(SendMessageRequestHeaderV2)
        return fixed

    def echo(_connection: Connection, command: RemotingCommand) -> Outcome:
        return command.reply(header=REPLY_EXT, body=command.body)

    table = HandlerTable()
    table.register(RequestCode.SEND_MESSAGE_V2, {"fixed": answer, "header": decode_header, "echo": echo}[kind])
    return table, len(fixed) + (body if kind == "echo" else 0)


def load(pipe: Pipe, address: tuple[str, int], row: tuple[int, int], body: int, reply: int) -> None:
    """In the child: keep ``row`` requests in flight until ``pipe`` has a message.

    Sends "started" when all windows are full, and at the end the number of requests, their median and p99 latency.
    """
    connections, window = row
    block = encode(sample(body)) * window
    poll = select.epoll()
    socks = {}
    for _ in range(connections):
        sock = socket.create_connection(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(sock, select.EPOLLIN)
        socks[sock.fileno()] = sock
    missing = dict.fromkeys(socks, reply * window)
    since = dict.fromkeys(socks, time.perf_counter())
    times: list[float] = []
    for sock in socks.values():
        sock.sendall(block)
    pipe.send("started")
    while not pipe.poll():
        for fd, _ in poll.poll(1):
            outstanding = missing[fd] - len(socks[fd].recv(1 << 20))
            if not outstanding:
                now = time.perf_counter()
                times.append(now - since[fd])
                since[fd] = now
                outstanding = reply * window
                socks[fd].sendall(block)
            missing[fd] = outstanding
    times.sort()
    pipe.send((len(times) * window, times[len(times) // 2], times[len(times) * 99 // 100]))


async def measure(kind: str, row: tuple[int, int], body: int, seconds: float) -> str:
    table, reply = handlers(kind, body)
    reactor = Reactor()
    sock = listen("127.0.0.1", 0)
    reactor.add_listener(sock, table)
    pipe, end = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=load, args=(end, sock.getsockname(), row, body, reply), daemon=True)
    child.start()
    async with trio.open_nursery() as nursery:
        await nursery.start(reactor.run)
        await trio.to_thread.run_sync(pipe.recv)  # the child has filled its windows
        frames, rounds = reactor.stats.frames, reactor.stats.rounds
        began, cpu = time.perf_counter(), time.process_time()
        await trio.sleep(seconds)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        frames, rounds = reactor.stats.frames - frames, reactor.stats.rounds - rounds
        pipe.send(None)
        _, median, p99 = await trio.to_thread.run_sync(pipe.recv)
        await reactor.shutdown(1)
    child.join(5)
    return (
        f"{row[0]:>4} x {row[1]:<4}{frames / took:>10,.0f}{cpu / frames * 1e6:>9.2f}{frames / rounds:>9.1f}"
        f"{median * 1e3:>9.2f}{p99 * 1e3:>9.2f}{cpu / took:>8.0%}"
    )


@click.command()
@click.option("--seconds", default=3.0)
@click.option("--rows", default="1x1,64x1,8x32")
@click.option("--handler", type=click.Choice(["fixed", "header", "echo"]), default="fixed")
@click.option("--body", default=1024)
def main(seconds: float, rows: str, handler: str, body: int) -> None:
    """Measure each row and print a table."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(f"handler {handler}, body {body} bytes")
    print("conns x win  requests/s  us/req  req/rnd  p50 ms  p99 ms  busy")
    for row in rows.split(","):
        connections, window = (int(number) for number in row.split("x"))
        print(trio.run(measure, handler, (connections, window), body, seconds), flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
