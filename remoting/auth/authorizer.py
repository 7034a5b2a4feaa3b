"""What a user may do. Decisions are kept until users or policies change."""

from collections.abc import Iterable, Sequence
from typing import Final

from trimq.protocol.auth.decision import Verdict, decide, refusal
from trimq.protocol.auth.model import MOST_RESOURCE_BYTES, Action, Resource, refused
from trimq.remoting.auth.auth_store import AuthStore

MOST_DECISIONS: Final = 20_000
SUPER: Final = Verdict(True, None, None, "")
"""A Super may do everything: no policy is looked at."""


class Authorizer:
    """Decides by the policies of now. ``refusals`` counts the requests that were refused."""

    def __init__(self, store: AuthStore, *, most_decisions: int = MOST_DECISIONS) -> None:
        self.refusals = 0
        self._store = store
        self._most = most_decisions
        self._generation = -1
        self._kept: dict[tuple[str, Resource, tuple[Action, ...], str], Verdict] = {}

    def verdict(self, username: str, resource: Resource, actions: Sequence[Action], source_ip: str) -> Verdict:
        """The decision about one of ``actions`` on ``resource``. The user must be in the store, and is not a Super."""
        kept = self._kept
        if self._generation != self._store.generation:
            kept.clear()
            self._generation = self._store.generation
        if len(resource.name) > MOST_RESOURCE_BYTES:  # 20,000 names as long as a frame would be kept otherwise
            return decide(self._store.acl(username), resource, actions, source_ip)
        key = (username, resource, tuple(actions), source_ip)
        found = kept.get(key)
        if found is None:
            if len(kept) >= self._most:
                kept.clear()  # names of resources come from requests: the table must not grow with them
            found = kept[key] = decide(self._store.acl(username), resource, actions, source_ip)
        return found

    def check(self, username: str, needs: Iterable[tuple[Resource, Sequence[Action]]], source_ip: str) -> None:
        """Return if a user who has signed may do all of this: of each resource one of the actions.

        The user is looked up, so that a request which has waited is not served after a deletion. Raises
        RemotingError(NO_PERMISSION) for the first one that is refused.
        """
        user = self._store.user(username)
        if user is None or not user.is_enabled:
            self.refusals += 1
            raise refused(f"User:{username} is {'not found' if user is None else 'disabled'}.")
        if user.is_super:
            return
        for resource, actions in needs:
            verdict = self.verdict(username, resource, actions, source_ip)
            if not verdict.allowed:
                self.refusals += 1
                raise refused(refusal(username, resource, source_ip, verdict.reason))
