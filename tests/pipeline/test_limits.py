"""maxOffsetsPerTrigger: no batch exceeds it, every queue gets its share, and none waits for ever."""

from __future__ import annotations

from trimq.client.message import MessageQueue
from trimq.pipeline.topics.offsets import limited


def test_a_limit_is_kept_and_shared() -> None:
    queues = [MessageQueue(topic="T", broker_name="b", queue_id=number) for number in range(4)]
    begins = dict.fromkeys(queues, 100)
    ends = {queues[0]: 100, queues[1]: 101, queues[2]: 200, queues[3]: 1100}
    for most in (1, 2, 3, 7, 50, 1101, 5000):
        found = limited(begins, ends, most)
        sizes = [found[queue] - 100 for queue in queues]
        assert min(most, 1101) - 3 <= sum(sizes) <= min(most, 1101), "rounding may leave a few to the next batch"
        assert all(found[queue] <= ends[queue] for queue in queues)
    assert min(limited(begins, ends, 3)[queue] for queue in queues[1:]) == 101
    position, seen = begins, set()
    for _ in range(6):
        following = limited(position, ends, 1)
        seen |= {queue for queue in queues if following[queue] > position[queue]}
        position = following
    assert seen == set(queues[1:]), "no queue waits for ever"
