"""Selector: which sockets of a server are ready. Given by the composition root; simulated clusters have their own."""

import select
from typing import Protocol

import trio


class Selector(Protocol):
    """The methods of ``select.epoll`` that a reactor uses, with its masks, and a wait for trio."""

    def register(self, fd: int, eventmask: int, /) -> None:
        """Watch a descriptor."""
        ...

    def modify(self, fd: int, eventmask: int, /) -> None:
        """Change what is watched of a descriptor."""
        ...

    def unregister(self, fd: int, /) -> None:
        """Watch a descriptor no longer."""
        ...

    def poll(self, timeout: float, /) -> list[tuple[int, int]]:
        """(descriptor, mask) of those that are ready. ``timeout`` is 0: it never waits."""
        ...

    def close(self) -> None:
        """Release the selector."""
        ...

    async def wait(self) -> None:
        """Return when ``poll`` has something to report."""
        ...


class EpollSelector:
    """The Selector of the operating system."""

    def __init__(self) -> None:
        epoll = select.epoll()
        # epoll's own methods: the reactor polls in a tight loop.
        self.register = epoll.register
        self.modify = epoll.modify
        self.unregister = epoll.unregister
        self.poll = epoll.poll
        self.close = epoll.close
        self._fd = epoll.fileno()

    async def wait(self) -> None:
        """See Selector."""
        await trio.lowlevel.wait_readable(self._fd)
