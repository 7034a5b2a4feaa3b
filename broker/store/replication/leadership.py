"""Leadership: what the controllers have assigned to a broker, and what its store wants them to change.

The broker's ReplicasManager sets it, the store's HA service reads it. Belongs to the event loop.
"""

from collections.abc import Callable, Iterable

import trio


class Leadership:
    """One broker's part in a set of replicas, during one life of its store.

    ``epoch`` is the present master's. ``members`` is the SyncStateSet as the controllers have it, ``set_epoch`` the
    number of its last change; both count on the master only. ``learner``: this broker never joins the set.
    """

    def __init__(
        self,
        broker_id: int,
        epoch: int,
        members: Iterable[int],
        set_epoch: int,
        boot_seconds: Callable[[], float],
        *,
        learner: bool = False,
    ) -> None:
        """``boot_seconds``: see Clock."""
        self.broker_id = broker_id
        self.epoch = epoch
        self.members = frozenset(members)
        self.set_epoch = set_epoch
        self.learner = learner
        self.proposed: frozenset[int] | None = None
        """A set that a controller was asked for, and has not answered."""
        self.lease_until: float | None = None
        """Until when no other broker becomes the master, in ``boot_seconds``. None: the controllers give no lease."""
        self.on_changed: Callable[[], None] = lambda: None
        """Called when something here has changed. The store sets it."""
        self.on_truncate: Callable[[int], None] = lambda _offset: None
        """Called on a slave whose log is its master's up to an offset only: the store is to be opened with less."""
        self._boot_seconds = boot_seconds
        self._wanted: frozenset[int] | None = None
        self._wanted_event = trio.Event()

    @property
    def awaited(self) -> frozenset[int]:
        """The members that a message needs. While a change is not answered, those of both sets."""
        return self.members if self.proposed is None else self.members | self.proposed

    def holds(self) -> bool:
        """Whether no other broker can be the master now. Always, if the controllers give no lease."""
        return self.lease_until is None or self._boot_seconds() < self.lease_until

    # the manager

    def set_members(self, members: Iterable[int], set_epoch: int) -> None:
        """The controllers have this set now."""
        self.members, self.set_epoch, self.proposed = frozenset(members), set_epoch, None
        if self._wanted == self.members:
            self._wanted = None
        self.on_changed()

    def propose(self, members: frozenset[int] | None) -> None:
        """Before a controller is asked for another set; None once it is known that it has refused."""
        self.proposed = members
        if members is not None:
            self._wanted_event.set()
        self.on_changed()

    def renew(self, until: float) -> None:
        """A controller has renewed the lease."""
        if self.lease_until is None or until > self.lease_until:
            self.lease_until = until
            self.on_changed()

    @property
    def wish(self) -> frozenset[int] | None:
        """The set that the store wants; None if it wants no other."""
        return self._wanted

    async def wanted(self) -> frozenset[int]:
        """Wait until the store wants another set, and return it.

        While one is proposed, that one is returned at once: its members are waited for until its outcome is known.
        """
        while (found := self.proposed or self._wanted) is None:
            self._wanted_event = trio.Event()
            await self._wanted_event.wait()
        return found

    # the store

    def want(self, members: frozenset[int]) -> None:
        """Ask for another set. The latest wish counts; one that is equal to ``members`` withdraws it."""
        self._wanted = members if members != self.members else None
        if self._wanted is not None:
            self._wanted_event.set()
