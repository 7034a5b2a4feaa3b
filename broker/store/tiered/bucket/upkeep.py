"""The upkeep of a bucket by its owner: joins, deletions of what belongs to the history no more, expiry."""

from collections.abc import Callable, Collection
from random import Random
from typing import Final

import structlog
import trio

from trimq.broker.store.tiered.bucket.backoff import Backoff
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.garbage import find_garbage
from trimq.broker.store.tiered.bucket.joiner import Joiner
from trimq.broker.store.tiered.bucket.manifest import FencedError
from trimq.broker.store.tiered.bucket.uploader import BucketUploads
from trimq.protocol.bucket_object import BucketFormatError
from trimq.remoting.runtime.clock import Clock

_log: Final = structlog.get_logger(__name__)

_UPKEEP: Final = 10.0
"""Seconds between two looks for objects to join or to delete."""
SAVE_AFTER: Final = 3600.0
"""Seconds after which the root is replaced for a few objects too: an owner learns then that there is another one."""
SEARCH_AFTER: Final = 600.0
_SEARCH_AGAIN: Final = 86_400.0
"""Seconds after the start, and from one to the next, until the bucket is searched for what interrupted writes left."""
_AT_ONCE: Final = 1000


class Upkeep:
    """See above. ``fenced`` is called when another broker has taken the bucket."""

    def __init__(
        self,
        tier: BucketQueues,
        uploads: BucketUploads,
        joiner: Joiner,
        clock: Clock,
        random: Random,
        *,
        own_indexes: Callable[[], Collection[str]],
        fenced: Callable[[FencedError], None],
    ) -> None:
        """``own_indexes``: the index files that were or are being uploaded, which the next root names."""
        self._tier = tier
        self._uploads = uploads
        self._joiner = joiner
        self._clock = clock
        self._random = random
        self._own_indexes = own_indexes
        self._fenced = fenced
        self._replaced: list[str] = []
        """Objects that were joined, and that the root still names."""

    @property
    def _bucket_name(self) -> str:
        return self._uploads.config.tiered_store_bucket

    async def run(self) -> None:
        """Join and delete until this broker is fenced."""
        pauses = Backoff(self._random)
        failed = False
        saved_at = self._clock.monotonic()
        # Not before the grace is over: what waited for it when the process before ended is not known any more.
        grace = self._uploads.config.tiered_store_bucket_grace_time / 1000
        next_search = saved_at + max(SEARCH_AFTER, grace)
        while not self._uploads.fenced:
            try:
                if self._tier.is_saved:
                    saved_at = self._clock.monotonic()
                elif self._clock.monotonic() - saved_at >= SAVE_AFTER:
                    await self._uploads.save()
                await self._tier.garbage.delete_due()
                found = await self.join()
                if self._clock.monotonic() >= next_search:
                    await self.delete_garbage()
                    next_search = self._clock.monotonic() + _SEARCH_AGAIN
            except FencedError as error:
                self._fenced(error)
                return
            except (OSError, BucketFormatError) as error:
                if not failed:
                    _log.error("tier_upkeep_failed", bucket=self._bucket_name, error=str(error))
                failed = True
                await trio.sleep(pauses.next())
                continue
            if failed:
                _log.info("tier_upkeep_resumed", bucket=self._bucket_name)
            failed = False
            pauses.reset()
            await trio.sleep(0 if found else _UPKEEP)

    async def join(self) -> bool:
        """Do the next join, if there is one. Returns whether there was. Raises OSError, BucketFormatError, FencedError.

        The old objects are garbage once the root names the new ones.
        """
        self._replaced += await self._joiner.join_next(self._clock.wall_ms())
        if not self._replaced:
            return False
        await self._uploads.save()
        replaced, self._replaced = self._replaced, []
        self._tier.discard(replaced)
        return True

    async def delete_garbage(self) -> int:
        """Delete what interrupted writes have left in the bucket; return the number.

        Raises OSError, BucketFormatError, FencedError.
        """
        # The root is replaced first: a broker that was frozen, and owns the bucket no more, knows too little to delete.
        await self._uploads.save()
        self._tier.discard(())  # the pages that it has replaced
        grace = self._uploads.config.tiered_store_bucket_grace_time
        bucket = self._tier.bucket
        # Index files are uploaded by another task, and named by the next root.
        own = self._own_indexes()
        found = await find_garbage(bucket, self._tier.manifest, self._clock.wall_ms(), grace, own)
        # What was replaced just now may be old, and is still read: it goes after the grace.
        waiting = self._tier.replaced
        waiting.update(self._own_indexes())  # again: one of them may have been found by a second attempt
        names = [info.name for info in found if info.name not in waiting]
        for at in range(0, len(names), _AT_ONCE):
            await bucket.delete(names[at : at + _AT_ONCE])
        if names:
            _log.info("tier_garbage_deleted", bucket=self._bucket_name, count=len(names))
        return len(names)

    async def expire(self) -> int:
        """Delete the objects whose messages are all older than the reserved time. Returns their number."""
        if not self._tier.manifest.is_owner or self._uploads.fenced:
            return 0
        before = self._clock.wall_ms() - self._tier.reserved_ms("")
        try:
            count = await self._tier.expire(before)
        except OSError as error:
            _log.error("tiered_segment_not_deleted", bucket=self._bucket_name, error=str(error))
            return 0
        except FencedError as error:
            self._fenced(error)
            return 0
        if count:
            self._uploads.succeeded()
            _log.info("tiered_segments_deleted", count=count)
        return count
