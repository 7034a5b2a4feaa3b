"""mqadmin: the command that shows message traces."""

from collections.abc import Sequence
from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.admin.traces import TraceView
from trimq.client.errors import UsageError
from trimq.client.mqadmin.shell import Commands, Output, parse_time, show_time
from trimq.protocol.codes import ResponseCode
from trimq.protocol.message_trace import EndTransactionTrace, PubTrace, RecallTrace, SubAfterTrace, SubBeforeTrace
from trimq.protocol.topic_rules import TRACE_TOPIC

commands: Commands = Commands()

_JSON_COLUMNS = (
    "Type", "Group", "ClientHost", "Time", "CostTimes", "Status", "Topic", "MsgId", "Tags", "Keys", "StoreHost",
    "BodyLength", "MsgType", "OffsetMsgId", "RequestId", "RetryTimes", "ContextCode", "TransactionId",
    "FromTransactionCheck", "RegionId",
)  # fmt: skip
_JSON_FIELDS = (
    "topic", "message_id", "tags", "keys", "store_host", "body_length", "message_type", "offset_message_id",
    "request_id", "retry_times", "context_code", "transaction_id", "from_transaction_check", "region",
)  # fmt: skip
"""The fields of a trace for the columns from Topic on."""


def _status(view: TraceView) -> str:
    trace = view.trace
    if isinstance(trace, SubBeforeTrace):
        return "started"
    if isinstance(trace, EndTransactionTrace):
        return trace.state
    return "success" if trace.success else "failed"


def _cost(view: TraceView) -> int | None:
    return getattr(view.trace, "cost", None)


def _row(kind: str, group: str, view: TraceView) -> list[str]:
    cost = _cost(view)
    time = show_time(view.time * 1000).partition(",")[0]
    return [kind, group, view.client_host, time, "" if cost is None else f"{cost}ms", _status(view)]


def _json_row(view: TraceView) -> list[Any]:
    trace = view.trace
    fields = [getattr(trace, name, None) for name in _JSON_FIELDS]
    return [trace.type, trace.group, view.client_host, int(view.time * 1000), _cost(view), _status(view), *fields]


def _show(out: Output, views: Sequence[TraceView]) -> None:
    """One table for sends, one for each consumer group, one for the ends of transactions and recalls."""
    rest = ["ClientHost", "SendTime", "CostTimes", "Status"]
    pubs = [_row("Pub", view.trace.group, view) for view in views if isinstance(view.trace, PubTrace)]
    if pubs:
        out.table(["Type", "ProducerGroup", *rest], pubs)
        out.say("")
    started = {view.trace.request_id: view for view in views if isinstance(view.trace, SubBeforeTrace)}
    consumed: dict[str, list[list[str]]] = {}
    for view in views:
        trace = view.trace
        if isinstance(trace, SubAfterTrace):
            before = started.pop(trace.request_id, None)
            group = trace.group or (before.trace.group if before is not None else None) or ""
            consumed.setdefault(group, []).append(_row("Sub", group, view))
    for view in started.values():  # these have no end yet
        group = view.trace.group or ""
        consumed.setdefault(group, []).append(_row("Sub", group, view))
    for rows in consumed.values():
        out.table(["Type", "ConsumerGroup", "ClientHost", "ConsumerTime", "CostTimes", "Status"], rows)
        out.say("")
    others = [
        _row(view.trace.type, view.trace.group, view)
        for view in views
        if isinstance(view.trace, EndTransactionTrace | RecallTrace)
    ]
    if others:
        out.table(["Type", "ProducerGroup", *rest], others)


@commands.add("queryMsgTraceById")
@click.option("-i", "--msgId", "message_id", required=True, help="The id that the producer gave the message.")
@click.option("-t", "--traceTopic", "topic", default=TRACE_TOPIC, show_default=True, help="The topic with the traces.")
@click.option(
    "-b", "--beginTimestamp", "begin", default="0", help="From this time: milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS."
)
@click.option(
    "-e", "--endTimestamp", "end", default="now", help="Until this time: milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS."
)
@click.option(
    "-c", "--maxNum", "most", type=click.IntRange(1), default=64, show_default=True, help="Most messages with traces."
)
async def by_id(admin: Admin, out: Output, *, message_id: str, topic: str, begin: str, end: str, most: int) -> None:
    """Show what producers and consumers have reported about a message."""
    message_id = message_id.strip()
    found = await admin.message_traces(
        message_id, trace_topic=topic, begin=parse_time(begin) or 0.0, end=parse_time(end), max_messages=most
    )
    if found.skipped:
        click.echo(f"{found.skipped} traces cannot be decoded and are left out", err=True)
    if not found.views:
        raise UsageError(f"there is no trace of {message_id} in {topic}", code=ResponseCode.QUERY_NOT_FOUND)
    if out.as_json:
        out.table(_JSON_COLUMNS, map(_json_row, found.views))
    else:
        _show(out, found.views)
