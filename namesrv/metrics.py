"""The name server's page for Prometheus. Imported only if metrics are on. The size of the page is constant."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from trimq.namesrv.route_info import RouteInfoManager
from trimq.remoting.auth.followed_users import FollowedUsers
from trimq.remoting.http.access_metrics import access_families
from trimq.remoting.http.health import Health
from trimq.remoting.http.metrics import (
    build_info,
    gauge,
    loop_families,
    process_families,
    reactor_families,
    text_of,
)
from trimq.remoting.runtime.loop_probe import LoopProbe
from trimq.remoting.server.limits import ReactorStats


class NamesrvMetrics:
    """Makes the page of counters that exist anyway."""

    def __init__(
        self, routes: RouteInfoManager, reactor: ReactorStats, health: Health, users: FollowedUsers | None = None
    ) -> None:
        """``users``: while authentication is on."""
        self._routes = routes
        self._reactor = reactor
        self._users = users
        self._health = health
        self.probe = LoopProbe()

    async def page(self) -> Iterator[str]:
        """The pieces of the page."""
        return (text_of(family) for family in self._families())

    def _families(self) -> Iterator[Metric]:
        yield build_info("mqnamesrv")
        yield gauge("trimq_ready", "1 where /readyz has no reason against it.", int(self._health.readiness().ready))
        yield gauge("trimq_namesrv_brokers", "Broker processes that are registered.", len(self._routes.live_brokers()))
        yield gauge("trimq_namesrv_topics", "Topics with a route.", len(self._routes.topics))
        yield from access_families(None if self._users is None else self._users.users)
        yield from reactor_families(self._reactor)
        yield from loop_families(self.probe)
        yield from process_families()
