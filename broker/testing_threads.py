"""The real broker for tests that do not run in trio: in a thread with its own loop, stopped when the block ends."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import trio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.remoting.runtime.clock import ManualClock


class BrokerUnderTest(NamedTuple):
    """A running broker. Clients connect to ``namesrv``; ``address`` is the broker's own address."""

    namesrv: str
    address: str
    controller: BrokerController
    portal: BlockingPortal
    clock: ManualClock | None = None

    def advance(self, seconds: float) -> None:
        """Advance the broker's clock, so that everything due by then happens. Needs a broker with a ManualClock.

        >>> clock = ManualClock()
        >>> with broker_in_thread(clock=clock) as broker:
        ...     before = clock.wall_ms()
        ...     broker.advance(3600)
        ...     clock.wall_ms() - before
        3600000
        """
        if self.clock is None:
            raise RuntimeError("this broker runs on the machine's clock: start it with clock=ManualClock()")
        self.portal.call(self.clock.advance, seconds)


class ClusterUnderTest(NamedTuple):
    """Running brokers that share a name server."""

    namesrv: str
    brokers: tuple[BrokerUnderTest, ...]


@contextmanager
def broker_in_thread(
    directory: Path | None = None, *, clock: ManualClock | None = None, **changes: object
) -> Iterator[BrokerUnderTest]:
    """Run a broker and its name server on free ports. ``changes`` are configuration keys as RocketMQ spells them.

    With a ``clock`` the broker's time changes only by ``advance``.

    >>> with broker_in_thread(brokerName="broker-x") as broker:
    ...     broker.namesrv.startswith("127.0.0.1:")
    True
    """
    _check_no_trio()
    settings = {"embeddedNamesrvEnable": True, "embeddedNamesrvPort": 0, **changes}
    with (
        start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(running_broker(directory, clock=clock, **settings)) as controller,  # type: ignore[arg-type]
    ):
        yield BrokerUnderTest(_name_server(controller), controller.address, controller, portal, clock)


@contextmanager
def cluster_in_thread(brokers: int = 2, **changes: object) -> Iterator[ClusterUnderTest]:
    """Run brokers (broker-a, broker-b, ...) that share a name server.

    >>> with cluster_in_thread(2) as cluster:
    ...     len({broker.address for broker in cluster.brokers})
    2
    """
    with ExitStack() as stack:
        first = stack.enter_context(broker_in_thread(**{"brokerName": "broker-a", **changes}))  # type: ignore[arg-type]
        running = [first]
        for letter in "bcdefgh"[: brokers - 1]:
            settings = {
                "brokerName": f"broker-{letter}",
                "embeddedNamesrvEnable": False,
                "namesrvAddr": first.namesrv,
                **changes,
            }
            portal = stack.enter_context(start_blocking_portal("trio"))
            cm = portal.wrap_async_context_manager(running_broker(None, **settings))  # type: ignore[arg-type]
            controller = stack.enter_context(cm)
            running.append(BrokerUnderTest(first.namesrv, controller.address, controller, portal))
        yield ClusterUnderTest(first.namesrv, tuple(running))


def _check_no_trio() -> None:
    """Raise RuntimeError inside a trio program: trio starts no second loop, and anyio would wait for it forever."""
    if trio.lowlevel.in_trio_run():
        raise RuntimeError("inside a trio program use trimq.broker.testing.running_broker(), or enter this in a thread")


def _name_server(controller: BrokerController) -> str:
    assert controller.namesrv is not None
    assert controller.namesrv.address is not None
    host, port = controller.namesrv.address
    return f"{host}:{port}"
