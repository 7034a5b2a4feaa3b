"""OpenTelemetry tracing for producers and consumers. Needs the ``otel`` extra.

Each send is a span. Its context is sent in the message's properties (W3C trace context), so the span of the processing
is connected to it, in this program or in one written in another language::

    from trimq.client.otel import Tracing

    async with Producer("orders", namesrv=..., interceptors=[Tracing()]) as producer:
        ...
"""

from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, Tracer

from trimq.client.interceptors import Interceptor, ProcessContext, SendContext

__all__ = ["Tracing"]

SYSTEM: Final = "rocketmq"


class Tracing(Interceptor):
    """Spans for sends (PRODUCER) and for processing (CONSUMER), by OpenTelemetry's conventions for messaging.

    Pass it in ``interceptors`` of producers and consumers. ``tracer`` defaults to that of the global tracer provider.

    >>> tracing = Tracing()
    >>> isinstance(tracing, Interceptor)
    True
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("trimq.client")

    def before_send(self, context: SendContext) -> None:
        """Starts a span and puts its context into the message's properties."""
        span = self._tracer.start_span(
            f"send {context.message.topic}",
            kind=SpanKind.PRODUCER,
            attributes={
                "messaging.system": SYSTEM,
                "messaging.operation.type": "send",
                "messaging.destination.name": context.message.topic,
                "messaging.client.group": context.group,
                "messaging.message.body.size": len(context.message.body),
                **({"messaging.rocketmq.message.tag": context.message.tags} if context.message.tags else {}),
            },
        )
        propagate.inject(context.properties, trace.set_span_in_context(span))
        context.data[self] = span

    def after_send(self, context: SendContext) -> None:
        """Ends the span with the outcome of the send."""
        span = context.data.pop(self, None)
        if span is None:
            return
        if context.message.message_id:
            span.set_attribute("messaging.message.id", context.message.message_id)
        if context.queue is not None:
            span.set_attribute("messaging.destination.partition.id", str(context.queue.queue_id))
        if context.address is not None:
            span.set_attribute("server.address", context.address)
        if context.error is not None:
            span.record_exception(context.error)
            span.set_status(Status(StatusCode.ERROR, str(context.error)))
        span.end()

    def before_process(self, context: ProcessContext) -> None:
        """Starts a span: for one message a child of the send's span, for a batch linked to the spans of all sends."""
        parents = [propagate.extract(message.all_properties) for message in context.messages]
        spans = [trace.get_current_span(parent).get_span_context() for parent in parents]
        first = context.messages[0]
        attributes: dict[str, Any] = {
            "messaging.system": SYSTEM,
            "messaging.operation.type": "process",
            "messaging.destination.name": first.topic,
            "messaging.consumer.group.name": context.group,
        }
        if len(context.messages) == 1:
            attributes["messaging.message.id"] = first.message_id
        else:
            attributes["messaging.batch.message_count"] = len(context.messages)
        span = self._tracer.start_span(
            f"process {first.topic}",
            context=parents[0] if len(parents) == 1 else None,
            kind=SpanKind.CONSUMER,
            links=[Link(one) for one in spans if one.is_valid],
            attributes=attributes,
        )
        context.data[self] = (span, otel_context.attach(trace.set_span_in_context(span)))

    def after_process(self, context: ProcessContext) -> None:
        """Ends the span, with the exception that ended the processing."""
        found = context.data.pop(self, None)
        if found is None:
            return
        span, token = found
        otel_context.detach(token)
        if context.error is not None:
            span.record_exception(context.error)
            span.set_status(Status(StatusCode.ERROR, str(context.error)))
        span.end()
