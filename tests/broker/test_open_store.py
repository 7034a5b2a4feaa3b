"""A start that the store, or what it says of transactions, makes impossible is refused with the reason."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from trimq.broker import state_services
from trimq.broker.controller import BrokerController
from trimq.broker.open_store import opened
from trimq.broker.services.state_file import StateFileError
from trimq.broker.start_error import StartError
from trimq.broker.store.message_store import MessageStore, StoreInUseError, StoreLoadError
from trimq.broker.testing import configuration


class Store:
    """Cannot be opened."""

    root = "/store"

    def __init__(self, *reasons: Exception) -> None:
        self.reasons = reasons

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        for reason in self.reasons:
            raise reason
        yield


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (StoreInUseError("in use"), "in use"),
        (StoreLoadError("a file is missing"), "a file is missing"),
        (OSError(errno.EACCES, "Permission denied"), r"the store /store cannot be opened: .*Permission denied"),
        (ExceptionGroup("the tier", [StoreLoadError("a bad segment")]), "a bad segment"),
        (ExceptionGroup("the tier", [OSError(errno.EIO, "broken")]), "broken"),
    ],
)
async def test_a_store_that_cannot_be_opened_refuses_the_start_with_the_reason(reason: Exception, text: str) -> None:
    with pytest.raises(StartError, match=text):
        async with opened(cast("MessageStore", Store(reason))):
            pass


async def test_a_fault_of_the_program_is_shown_as_it_is() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with opened(cast("MessageStore", Store(ExceptionGroup("tasks", [KeyError("odd")])))):
            pass
    assert raised.group_contains(KeyError)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (StateFileError("no space"), "the damaged op queue cannot be rebuilt: no space"),
        (OSError(errno.EIO, "broken"), r"the transactions cannot be read: .*broken"),
    ],
)
async def test_transactions_that_cannot_be_read_refuse_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception, text: str
) -> None:
    async def fail(*_: object) -> None:
        raise reason

    monkeypatch.setattr(state_services, "read_back", fail)
    with pytest.raises(ExceptionGroup) as raised:
        await BrokerController(configuration(tmp_path, {})).run()
    assert raised.group_contains(StartError, match=text)
