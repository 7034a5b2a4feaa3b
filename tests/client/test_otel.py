"""The spans of a send and of its processing belong to one trace, over a real broker."""

import anyio
import pytest

from tests.client.servers import Servers
from trimq.client import Consumer, Message, Producer, UsageError

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from trimq.client.otel import Tracing

pytestmark = pytest.mark.anyio


async def test_a_send_and_its_processing_are_one_trace(servers: Servers, name: str) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"))
    async with Producer(name, namesrv=servers.namesrv, interceptors=[tracing]) as producer:
        receipt = await producer.send(Message(name, b"x", tags="t"))
        with pytest.raises(UsageError):
            await producer.send(Message(name, b""))
    async with Consumer(name, name, namesrv=servers.namesrv, start="first", interceptors=[tracing]) as consumer:
        with anyio.fail_after(30):
            message = await anext(consumer)
            async with message.process():
                pass
    sent, failed, processed = exporter.get_finished_spans()
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert sent.attributes is not None
    assert sent.attributes["messaging.message.id"] == receipt.message_id
    assert processed.context is not None
    assert sent.context is not None
    assert processed.context.trace_id == sent.context.trace_id
    assert processed.parent is not None
    assert processed.parent.span_id == sent.context.span_id
    assert failed.status.status_code is StatusCode.ERROR


async def test_a_batch_and_a_handler_that_fails(servers: Servers, name: str) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"))
    servers.create_topic(name, 1)
    async with Producer(name, namesrv=servers.namesrv, interceptors=[tracing]) as producer:
        for _ in range(3):
            await producer.send(Message(name, b"x"))
    async with Consumer(name, name, namesrv=servers.namesrv, start="first", interceptors=[tracing]) as consumer:
        with anyio.fail_after(30):
            async for batch in consumer.batches(3):
                async with batch.process():
                    raise ValueError("not today")
                break
    *sent, processed = exporter.get_finished_spans()
    assert processed.attributes is not None
    assert processed.attributes["messaging.batch.message_count"] == len(batch)
    assert {link.context.trace_id for link in processed.links} <= {one.context.trace_id for one in sent if one.context}
    assert len(processed.links) == len(batch) > 1
    assert (processed.status.status_code, processed.status.description) == (StatusCode.ERROR, "not today")
