"""The SDK's log: short lines of the standard library's logging, one per outage, without bodies or local variables.

Guards against tracebacks with local variables on standard output (941 KB for 81 failing messages, 25 ms of the loop
each) and against a line for each heartbeat, pull and commit that fails while a server is away.
"""

import logging
import subprocess
import sys
from functools import partial

import anyio
import pytest

from tests.client.scripted import scripted_broker
from tests.client.test_units import queue, record
from trimq.client import Client, ClientOptions, NotStoredError, PerhapsStoredError, UnreachableError
from trimq.client.core import Push
from trimq.client.decode import split_messages
from trimq.client.delivery import ConsumerMessage
from trimq.client.interceptors import call_all
from trimq.client.lifecycle import Lifecycle
from trimq.client.mqadmin import shell
from trimq.client.offsets import BrokerOffsets
from trimq.client.outages import Outages
from trimq.client.process_queue import Counts
from trimq.protocol.body import ProducerData
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.remoting.client.client_log import LINES, MOST, StandardLog, error_text

pytestmark = pytest.mark.timeout(30)

A, B = "127.0.0.1:1", "127.0.0.1:2"
SECRET = "s3cret-of-a-local-variable"
BODY = b"the-body-of-a-message"


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log at all levels with a full budget: earlier tests in the same process may have used that of the modules."""
    caplog.set_level(logging.DEBUG, "trimq.client")
    for name, module in list(sys.modules.items()):
        log = vars(module).get("_log")
        if isinstance(log, StandardLog):
            monkeypatch.setattr(module, "_log", StandardLog(log.logger.name))
            assert name.startswith("trimq.client")


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """The lines logged at ``level`` and above. Checks that none has exception data, which includes local variables."""
    ours = [entry for entry in caplog.records if entry.name.startswith("trimq.client")]
    assert not [entry for entry in ours if entry.exc_info or entry.exc_text or entry.stack_info]
    assert BODY.decode() not in caplog.text
    assert SECRET not in caplog.text
    return [entry.getMessage() for entry in ours if entry.levelno >= level]


class Receiver:
    """Stands for the consumer and the process queue of a message made by a test."""

    group = "g"
    before_process = after_process = ()

    def __init__(self) -> None:
        self.counts = Counts()

    async def hand_back(self, *_: object) -> None:
        """Do nothing."""


def fail(*_: object) -> None:
    local = SECRET  # noqa: F841 - a log of local variables would show it
    raise ValueError("no such customer")


@pytest.mark.anyio
async def test_a_failing_handler_is_a_line_with_the_exceptions_text(caplog: pytest.LogCaptureFixture) -> None:
    head = record(BODY)
    [message] = split_messages(head, "a", ConsumerMessage)
    message._receiver = (Receiver(), Receiver())
    async with message.process():
        fail()
    [line] = lines(caplog)
    assert line.startswith("processing failed; again later (reason=ValueError: no such customer, messages=")
    assert "offset=3" in line
    assert len(line) < MOST
    [where] = [text for text in lines(caplog, logging.DEBUG) if text != line]
    assert "in fail" in where  # the traceback is at DEBUG only
    caplog.clear()
    caplog.set_level(logging.INFO, "trimq.client")
    async with message.process():
        fail()
    assert lines(caplog, logging.DEBUG) == [line]


@pytest.mark.anyio
async def test_a_background_task_is_logged_by_its_name_without_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    async def task(_batch: object) -> None:
        fail()

    async with Lifecycle() as owner:
        owner.spawn(partial(task, BODY))
        await anyio.wait_all_tasks_blocked()
    [line] = lines(caplog)
    assert "ValueError: no such customer" in line
    assert "<locals>.task" in line


def test_an_interceptor_that_fails_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    call_all([fail], BODY)
    assert lines(caplog) == ["an interceptor failed (reason=ValueError: no such customer, interceptor=fail)"]


@pytest.mark.anyio
async def test_what_fails_below_the_sdk_is_logged_likewise(caplog: pytest.LogCaptureFixture) -> None:
    """The SDK's handler cannot serve a request of the broker whose body has a message."""
    async with scripted_broker() as broker:
        broker.answers[RequestCode.HEART_BEAT] = RemotingCommand.reply
        async with Client(broker.address) as client:
            await client.invoke(broker.address, RemotingCommand.request(RequestCode.HEART_BEAT, {}))
            client._pushed = fail  # type: ignore[method-assign,assignment]
            client._remoting.register_processor(RequestCode.CONSUME_MESSAGE_DIRECTLY, client._pushed)
            command = RemotingCommand.request(RequestCode.CONSUME_MESSAGE_DIRECTLY, {}, BODY)
            await broker.seen[0][0].send(encode(command))
            with anyio.fail_after(20):
                while not lines(caplog):  # noqa: ASYNC110 - the log line is the only effect
                    await anyio.sleep(0.01)
    assert lines(caplog) == [
        f"request_failed (reason=ValueError: no such customer, address={broker.address}, code=309)"
    ]


def outages(now: list[float]) -> Outages:
    return Outages(StandardLog("trimq.client.test"), lambda: now[0])


def test_an_outage_is_a_line_when_it_begins_and_one_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    found = outages(now)
    for _ in range(50):
        found.note("a heartbeat", UnreachableError("refused", address=A))
        found.note("a pull", PerhapsStoredError("silence", address=A), level=logging.INFO)
    found.note("a pull", UnreachableError("refused", address=B))
    assert lines(caplog) == [
        f"a server does not answer (address={A}, reason=refused, tried=a heartbeat)",
        f"a server does not answer (address={B}, reason=refused, tried=a pull)",
    ]
    caplog.clear()
    now[0] += 12.34
    found.over(A)
    found.over(A)
    assert lines(caplog) == [f"a server answers again (address={A}, after=12.3 s, failures=100)"]
    assert list(found.open) == [B]
    found.note("a heartbeat", UnreachableError("refused", address=A))  # a new outage
    assert len(lines(caplog)) == 2


def test_a_refusal_that_goes_on_is_a_line_a_minute_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    found = outages(now)
    for second in range(121):
        now[0] = second
        found.note("a pull", NotStoredError("busy", code=2, address=A), level=logging.INFO, group="g")
    assert [("repeated=59" in line, "SYSTEM_BUSY (2)" in line) for line in lines(caplog)] == [
        (False, True), (True, True), (True, True),
    ]  # fmt: skip
    assert not found.open


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimq.client.outages._MOST", 3)
    found = outages([0.0])
    for number in range(9):
        found.note("x", UnreachableError("?", address=f"127.0.0.1:{number}"))
        found.note("x", NotStoredError("?", code=2, address=f"127.0.0.1:{number}"))
    assert len(found.open) == len(found._refusals) == 3


@pytest.mark.anyio
async def test_heartbeats_commits_and_name_servers_share_one_line_an_address(caplog: pytest.LogCaptureFixture) -> None:
    quick = ClientOptions(request_timeout=0.3)  # real time: a busy machine has to connect in it
    async with scripted_broker() as broker, Client(broker.address, quick) as client:
        await client.routes.get("T")
        client.join(Member())
        answers = dict(broker.answers)
        silent = (RequestCode.HEART_BEAT, RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.GET_ROUTEINFO_BY_TOPIC)
        broker.answers = dict.fromkeys(silent, lambda _: None)
        for _ in range(3):
            await client.heartbeat()
            await BrokerOffsets(client, "g").save({queue("a"): 1}, confirmed=True)
            with pytest.raises(UnreachableError):
                await client.routes.refresh("T")
        [line] = lines(caplog)
        assert line.startswith(f"a server does not answer (address={broker.address}, reason=no reply from")
        broker.answers = answers
        while client.outages.open:
            await client.heartbeat()
        line = lines(caplog)[-1]
        assert line.startswith(f"a server answers again (address={broker.address}, after=")
        assert len(lines(caplog)) == 2


class Member:
    """A producer, with the methods that heartbeats call."""

    def producer_data(self) -> ProducerData:
        return ProducerData(group_name="p")

    def consumer_data(self) -> None:
        """Return None: it is no consumer."""

    def pushes(self) -> dict[int, Push]:
        return {}


def test_lines_are_short_and_few(caplog: pytest.LogCaptureFixture) -> None:
    now = [1.0]
    log = StandardLog("trimq.client.test", lambda: now[0])
    log.warning("long", text="x" * 10_000, two="a\nb")
    assert caplog.messages == [f"long (text={'x' * MOST}..., two=a\\nb)"]
    caplog.clear()
    for _ in range(100):
        log.warning("again")
    assert caplog.messages == ["again"] * (LINES - 1)
    now[0] = 2.0
    log.warning("later")
    assert caplog.messages[-2:] == ["81 more lines were left out", "later"]


def test_an_exceptions_text_is_one_line() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_text(ValueError("a\nb")) == "ValueError: a\\nb"
    assert error_text(MuteError()) == "MuteError"
    group = ExceptionGroup("handlers", [ValueError("a"), KeyError("b")])
    assert error_text(group) == "ExceptionGroup of 2: ValueError: a; KeyError: 'b'"
    assert len(error_text(ValueError("x" * 10_000))) < MOST + 10


def test_a_program_that_configures_nothing_sees_warnings_only_and_on_standard_error() -> None:
    """No module of the SDK needs structlog or rich: all modules are imported here."""
    code = """
import importlib, logging, pkgutil, sys
from trimq import client
for module in pkgutil.walk_packages(client.__path__, "trimq.client."):
    if module.name != "trimq.client.otel":
        importlib.import_module(module.name)
from trimq.remoting.client.client_log import StandardLog
log = StandardLog("trimq.client.test")
log.info("quiet")
try:
    secret = "s3cret"
    raise ValueError("no")
except ValueError as error:
    log.fault(logging.WARNING, "reported", error)
print({"structlog", "rich"} & set(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert (run.stdout, run.stderr) == ("set()\n", "reported (reason=ValueError: no)\n")


def test_mqadmin_does_not_print_what_the_sdk_logs_in_passing() -> None:
    shell._quiet()
    assert not logging.getLogger("trimq.client.core").isEnabledFor(logging.WARNING)
    assert logging.getLogger("trimq.client.core").isEnabledFor(logging.ERROR)
