"""Messages for stores."""

from typing import Any

from tests.spark.logs import START, Sent


def some(count: int, **more: Any) -> list[Sent]:
    """Messages of five topics in two queues each, a millisecond apart."""
    return [
        Sent(
            **{
                "topic": f"T{number % 5}",
                "queue_id": number % 2,
                "body": f"body {number}".encode() * (number % 7 + 1),
                "properties": {"TAGS": "t", "UNIQ_KEY": f"U{number}"},
                "time": START + number,
                **more,
            }
        )
        for number in range(count)
    ]
