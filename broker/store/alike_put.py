"""The short way into the store for many ordinary messages that are laid out alike: PlainPut for all of them at once."""

from trimq.broker.store.plain_put import ShortWay
from trimq.broker.store.topic_queue import V4_HOSTS
from trimq.broker.store.types import MessageRows, PutCallback, PutMessageResult, PutMessageStatus
from trimq.protocol.record import SIZE_MAGIC


class AlikePut(ShortWay):
    """ASYNC_FLUSH: when ``put`` returns, the records can be read. SYNC_FLUSH: when ``on_done`` is called."""

    def put(self, rows: MessageRows, on_done: PutCallback | None = None) -> PutMessageResult | None:
        """Where the records are, in the order of ``rows``, at consecutive offsets of each queue.

        None where they have to go one by one: nothing has happened then. ``on_done`` is for SYNC_FLUSH: it gets the
        result, which says the same for all of them. Hosts are IPv4, no message is part of a transaction.
        """
        log = self._log
        file = log.file
        queues = rows.queues
        count = len(rows.rows)
        body_length, properties_length = rows.body_length, rows.properties_length
        size = queues[0].overhead + V4_HOSTS + body_length + properties_length
        if (
            file is None
            or self._lock.is_held
            or not self._flags.writable
            or (size > log.small and not log.allows(body_length, properties_length, size))
            or not body_length
            or any(queue.gone for queue in queues)
        ):
            return None
        at = file.wrote
        end = at + count * size
        if end > file.append_limit:
            return None
        now = max(self._wall_ms(), log.last_store_timestamp)
        first = file.start + at
        starts = rows.starts = [queue.next_offset for queue in queues]
        records = rows.rows.records(starts, first, now)
        # the first one's size and magic go in last: who is killed half-way leaves nothing that looks like a record
        file.buffer[at + SIZE_MAGIC.size : end] = records[SIZE_MAGIC.size :]
        file.buffer[at : at + SIZE_MAGIC.size] = records[: SIZE_MAGIC.size]
        file.wrote = end
        for queue, added in zip(queues, rows.rows.counts, strict=True):
            queue.next_offset += added
            queue.last_size = size
        log.last_store_timestamp = now
        if end >= log.poke_at:
            log.room.poke()
        stats = self._stats
        stats.put_message_times_total += count
        stats.put_message_size_total += end - at
        offsets = range(first, first + count * size, size)
        result = PutMessageResult(PutMessageStatus.PUT_OK, first, starts[0], end - at, now, offsets)
        if self._group is not None:
            self._group.submit(rows, result, on_done)
        else:
            self._dispatcher.dispatch_rows(rows, result)
        return result
