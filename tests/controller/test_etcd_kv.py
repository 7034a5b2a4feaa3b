"""etcd that does not answer, answers late, or ends in between."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from tests.controller.stores import Store, running
from tests.interop.harness.etcd import Etcd, running_etcd
from tests.ports import free_port
from trimq.controller import etcd_kv
from trimq.controller.etcd_kv import EtcdKv
from trimq.controller.kv import Compare, KvError, Put

OPERATIONS: Mapping[str, Callable[[EtcdKv], Awaitable[object]]] = {
    "grant": lambda kv: kv.grant(1000),
    "keep": lambda kv: kv.keep(1),
    "range": lambda kv: kv.range("/t/"),
    "txn": lambda kv: kv.txn([], [Put("/t/a", "1")]),
}


@asynccontextmanager
async def answering(*answers: Callable[[httpx.Request], httpx.Response]) -> AsyncIterator[EtcdKv]:
    """An EtcdKv with an endpoint for each of these; a request gets what its endpoint answers."""
    kv = EtcdKv([f"http://m{at}" for at in range(len(answers))])
    by_host = {f"m{at}": answer for at, answer in enumerate(answers)}

    async def handle(request: httpx.Request) -> httpx.Response:
        await trio.lowlevel.checkpoint()
        return by_host[request.url.host](request)

    await kv.close()
    kv._client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    try:
        yield kv
    finally:
        await kv.close()


def fails(error: type[httpx.RequestError]) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error("for the test", request=request)

    return answer


def says(body: object, status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, json=body)


DONE = says({"header": {"revision": "7", "raft_term": "2"}, "succeeded": True})


class TestWhatMayHaveBeenDone:
    @pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout])
    async def test_what_was_not_sent_is_asked_of_the_next(self, error: type[httpx.RequestError]) -> None:
        async with answering(fails(error), DONE) as kv:
            assert await kv.txn([], [Put("/t/a", "1")])
        async with answering(fails(error), fails(error)) as kv:
            with pytest.raises(KvError, match="for the test") as caught:
                await kv.txn([], [Put("/t/a", "1")])
        assert not caught.value.sent

    @pytest.mark.parametrize(
        "answer",
        [
            fails(httpx.ReadTimeout),
            fails(httpx.ReadError),
            fails(httpx.RemoteProtocolError),
            says({"error": "etcdserver: request timed out"}, 503),
            lambda _: httpx.Response(200, text="no JSON"),
        ],
    )
    async def test_a_transaction_that_may_have_been_done_is_not_repeated(
        self, answer: Callable[[httpx.Request], httpx.Response]
    ) -> None:
        asked = []

        def second(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return DONE(request)

        async with answering(answer, second) as kv:
            with pytest.raises(KvError) as caught:
                await kv.txn([], [Put("/t/a", "1")])
            assert caught.value.sent
            assert not asked
            assert await kv.txn([], [Put("/t/a", "1")]), "the next one begins with the other member"

    @pytest.mark.parametrize("operation", ["grant", "keep", "range"])
    async def test_what_decides_nothing_is_asked_of_all(self, operation: str) -> None:
        body = {"header": {"revision": "7", "raft_term": "2"}, "ID": "5", "TTL": "3"}
        async with answering(fails(httpx.ReadTimeout), says({**body, "result": body})) as kv:
            await OPERATIONS[operation](kv)
        async with answering(fails(httpx.ReadTimeout), fails(httpx.ReadTimeout)) as kv:
            with pytest.raises(KvError) as caught:
                await OPERATIONS[operation](kv)
        assert not caught.value.sent, "nothing was decided"

    async def test_each_task_asks_every_member(self) -> None:
        """All tasks meet the dead member at the same time, and all leave it."""
        async with answering(fails(httpx.ConnectError), DONE) as kv, trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(kv.range, "/t/")

    async def test_a_request_that_etcd_refuses(self) -> None:
        async with answering(says({"error": "etcdserver: duplicate key given in txn request"}, 400)) as kv:
            with pytest.raises(KvError, match=r"answers 400: .*duplicate key") as caught:
                await kv.txn([], [Put("/t/a", "1"), Put("/t/a", "2")])
        assert not caught.value.sent


class TestAnswers:
    @pytest.mark.parametrize("operation", ["grant", "keep", "range"])
    @pytest.mark.parametrize("body", [{}, {"header": {}}, {"header": {"revision": "x"}, "ID": None, "result": []}])
    async def test_what_is_no_answer_of_etcd(self, operation: str, body: object) -> None:
        async with answering(says(body)) as kv:
            with pytest.raises(KvError, match="answers what is not known") as caught:
                await OPERATIONS[operation](kv)
        assert not caught.value.sent

    async def test_an_error_is_no_end_of_a_lease(self) -> None:
        async with answering(says({"error": {"grpc_code": 14, "message": "etcdserver: no leader"}})) as kv:
            with pytest.raises(KvError):
                await kv.keep(5)

    async def test_a_renewal_by_a_leader_that_is_none_any_more(self) -> None:
        """A member that led and was cut off answers from its own clock; the majority has elected another."""

        def cut_off(request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("keepalive"):
                return httpx.Response(200, json={"result": {"header": {"raft_term": "2"}, "ID": "5", "TTL": "3"}})
            raise httpx.ReadTimeout("there is no majority here", request=request)

        async with answering(cut_off, says({"header": {"revision": "7", "raft_term": "3"}})) as kv:
            with pytest.raises(KvError, match="another leader"):
                await kv.keep(5)
        async with answering(cut_off, says({"header": {"revision": "7", "raft_term": "2"}})) as kv:
            assert await kv.keep(5) == 3000


class TestWatch:
    async def watch(self, kv: EtcdKv) -> list[str]:
        seen: list[str] = []
        with trio.fail_after(20):
            await kv.watch("/t/", 5, seen.append)
        return seen

    async def test_events_in_pieces(self) -> None:
        event = {"type": "DELETE", "kv": {"key": etcd_kv._text("/t/a")}}
        lines = [{"result": {"created": True}}, {"result": {"events": [event, {"kv": {"key": "x"}}]}}]
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(text), 7):
                yield text[at : at + 7]

        async with answering(lambda _: httpx.Response(200, content=pieces())) as kv:
            assert await self.watch(kv) == ["/t/a"]

    async def test_a_revision_that_is_compacted(self) -> None:
        line = json.dumps({"result": {"canceled": True, "compact_revision": "9"}}) + "\n"
        async with answering(lambda _: httpx.Response(200, text=line)) as kv:
            assert await self.watch(kv) == []

    async def test_silence(self) -> None:
        async with answering(fails(httpx.ReadTimeout)) as kv:
            assert await self.watch(kv) == []

    @pytest.mark.parametrize(
        "text", ["no JSON\n", '{"result":{"events":[{"type":"DELETE"}]}}\n', "[]\n", "x" * (1 << 21)]
    )
    async def test_what_is_no_watch_of_etcd(self, text: str) -> None:
        async with answering(lambda _: httpx.Response(200, text=text)) as kv:
            with pytest.raises(KvError):
                await self.watch(kv)

    async def test_it_goes_on_with_another_member(self) -> None:
        async with answering(fails(httpx.ConnectError), says({"result": {"canceled": True}})) as kv:
            with pytest.raises(KvError, match="http://m0"):
                await self.watch(kv)
            assert await self.watch(kv) == []


class TestRealEtcd:
    @pytest.mark.parametrize("operation", OPERATIONS)
    async def test_no_etcd(self, operation: str) -> None:
        kv = EtcdKv([f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"])
        with pytest.raises(KvError, match="etcd does not answer") as caught:
            await OPERATIONS[operation](kv)
        assert not caught.value.sent
        await kv.close()

    async def test_frozen_killed_and_started_again(self, tmp_path: Path) -> None:
        with running_etcd(tmp_path, members=1) as etcd:
            await self._faults(etcd)

    async def _faults(self, etcd: Etcd) -> None:
        (member,) = etcd.members
        async with running(Store(EtcdKv([member.client]), "/t/")) as store:
            kv = store.kv
            assert await kv.txn([], [Put("/t/a", "1")])
            since = await kv.range("/t/")
            with member.process.frozen():
                with pytest.raises(KvError) as caught:
                    await kv.txn([Compare("/t/a", since.revision)], [Put("/t/a", "2")])
                assert caught.value.sent, "it waits in etcd's socket"
                with pytest.raises(KvError) as caught:
                    await kv.range("/t/")
                assert not caught.value.sent
            member.process.kill()
            with pytest.raises(KvError) as caught:
                await kv.txn([], [Put("/t/a", "3")])
            assert not caught.value.sent
            with pytest.raises(KvError):
                await kv.watch("/t/", since.revision, lambda _: None)
            member.process.start()
            await trio.to_thread.run_sync(etcd.wait_for_leader)
            found = (await kv.range("/t/")).entries["/t/a"]
            assert found.value in {"1", "2"}, "what was never sent was not done"
