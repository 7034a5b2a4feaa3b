"""A controller's page for Prometheus. Imported only if metrics are on."""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from trimq.controller.replicas_info import ReplicasInfoManager
from trimq.remoting.auth.followed_users import FollowedUsers
from trimq.remoting.http.access_metrics import access_families
from trimq.remoting.http.health import Health
from trimq.remoting.http.metrics import (
    build_info,
    counter,
    gauge,
    loop_families,
    process_families,
    reactor_families,
    text_of,
)
from trimq.remoting.runtime.loop_probe import LoopProbe
from trimq.remoting.server.limits import ReactorStats


class ControllerMetrics:
    """Makes the page. The state of the groups is in the brokers' own metrics."""

    def __init__(
        self,
        replicas: ReplicasInfoManager,
        reactor: ReactorStats,
        health: Health,
        answers: Callable[[], bool],
        users: FollowedUsers | None = None,
    ) -> None:
        """``answers``: whether the store has answered last. ``users``: while authentication is on."""
        self._answers = answers
        self._replicas = replicas
        self._reactor = reactor
        self._users = users
        self._health = health
        self.probe = LoopProbe()

    async def page(self) -> Iterator[str]:
        """The pieces of the page."""
        return (text_of(family) for family in self._families())

    def _families(self) -> Iterator[Metric]:
        yield build_info("mqcontroller")
        yield gauge("trimq_ready", "1 where /readyz has no reason against it.", int(self._health.readiness().ready))
        yield counter(
            "trimq_controller_elections_total", "Masters elected by this controller.", self._replicas.elections
        )
        yield gauge("trimq_controller_store_answers", "1 while the controller's store answers.", int(self._answers()))
        yield gauge("trimq_controller_brokers", "Brokers that have sent a heartbeat here.", len(self._replicas.live))
        yield from access_families(None if self._users is None else self._users.users)
        yield from reactor_families(self._reactor)
        yield from loop_families(self.probe)
        yield from process_families()
