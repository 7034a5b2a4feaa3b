"""Which codes are served on the admin port only: every code has its place."""

import pytest

from tests.broker.auth.requests import CASES, CLUSTER
from trimq.protocol.auth.admin_port import OF_CLIENTS, ON_ADMIN_PORT, READ_BY_SERVERS
from trimq.protocol.auth.model import Action
from trimq.protocol.auth.permissions import ADMINISTRATION, BETWEEN_SERVERS, TO_CLIENTS, needs
from trimq.protocol.codes import RequestCode

Code = RequestCode
CHANGES = {Action.CREATE, Action.UPDATE, Action.DELETE}
PRODUCES_OR_CONSUMES = {Action.PUB, Action.SUB}

TOOLS_OF_ONE_GROUP = {
    Code.CONSUME_MESSAGE_DIRECTLY,  # has a consumer process a message
    Code.SET_MESSAGE_REQUEST_MODE,  # changes a group
}
"""What administrators send although its needs are those of a consumer."""
OF_NAME_SERVERS = {Code.GET_ROUTEINFO_BY_TOPIC}


@pytest.mark.parametrize("code", [pytest.param(code, id=code.name) for code in RequestCode])
def test_every_code_has_one_place(code: RequestCode) -> None:
    places = [code in group for group in (OF_CLIENTS, READ_BY_SERVERS, BETWEEN_SERVERS, TO_CLIENTS, ON_ADMIN_PORT)]
    assert sum(places) == 1
    if code in ADMINISTRATION:
        assert code in ON_ADMIN_PORT


@pytest.mark.parametrize("code", sorted(CASES))
def test_the_place_follows_from_what_a_code_needs(code: int) -> None:
    found = list(needs(CASES[code].command(code), CLUSTER))
    if any(set(actions) <= CHANGES for _, actions in found) and code not in BETWEEN_SERVERS:
        assert code in ON_ADMIN_PORT or code in OF_CLIENTS & {Code.UPDATE_CONSUMER_OFFSET}
    elif found and all(PRODUCES_OR_CONSUMES & set(actions) for _, actions in found):
        assert code in OF_CLIENTS or code in TOOLS_OF_ONE_GROUP | OF_NAME_SERVERS


def test_what_official_clients_need_stays() -> None:
    assert {29, 30, 31, 38, 351} <= OF_CLIENTS
    assert not {25, 26, 17, 200, 215, 207, 3001, 3004} & OF_CLIENTS
