"""Who may do what, request code by request code, at TriMQ's broker and at Apache's 5.5.0.

For each code a user without any policy and a user with exactly the needed ones send a valid request. TriMQ's broker
refuses the first and serves the second. Where Apache's does something else is in the tables below, and in
docs/security.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.broker.auth.requests import CASES, CLUSTER, Case
from tests.interop.harness import probe
from tests.interop.harness.security import allow, create_user, secured
from tests.interop.harness.servers import Cluster, Peer, running_cluster
from trimq.protocol.codes import RequestCode as Code

pytestmark = pytest.mark.xdist_group("access table")

SECRET = "canary-of-a-user"

#: Texts of refusals by the access control. Code 16 alone does not tell: brokers have other reasons for it.
REFUSALS = ("has no permission to access", "authorization context")
NO_PERMISSION = 16

#: Codes that only name servers and controllers serve. Apache's look at no user at all.
ELSEWHERE = frozenset(
    {*range(100, 107), 205, 206, 216, 217, 218, 219, 224, 304, 311, 312, 313, 318, 319, 327, *range(1001, 1014)}
) - {Code.GET_BROKER_EPOCH_CACHE, Code.NOTIFY_BROKER_ROLE_CHANGED}

#: What Apache's broker does for each user that it knows, without any policy.
OPEN_IN_APACHE = {
    # configuration and state of the broker; 26 with the passwords of the first users in clear
    Code.UPDATE_BROKER_CONFIG,
    Code.GET_BROKER_CONFIG,
    Code.GET_BROKER_RUNTIME_INFO,
    Code.GET_BROKER_HA_STATUS,
    Code.GET_BROKER_EPOCH_CACHE,
    Code.GET_BROKER_LITE_INFO,
    Code.GET_TIMER_CHECK_POINT,
    Code.GET_TIMER_METRICS,
    Code.SWITCH_TIMER_ENGINE,
    Code.SET_COMMITLOG_READ_MODE,
    Code.CLEAN_EXPIRED_CONSUMEQUEUE,
    Code.CLEAN_UNUSED_TOPIC,
    Code.DELETE_EXPIRED_COMMITLOG,
    # all topics, groups and offsets
    Code.GET_ALL_TOPIC_CONFIG,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    Code.GET_ALL_CONSUMER_OFFSET,
    Code.GET_ALL_DELAY_OFFSET,
    Code.GET_ALL_MESSAGE_REQUEST_MODE,
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    Code.UPDATE_AND_CREATE_TOPIC_LIST,
    Code.UPDATE_AND_CREATE_STATIC_TOPIC,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    Code.GET_COLD_DATA_FLOW_CTR_INFO,
    Code.UPDATE_COLD_DATA_FLOW_CTR_CONFIG,
    Code.REMOVE_COLD_DATA_FLOW_CTR_CONFIG,
    # messages, and the work of consumers
    Code.LITE_PULL_MESSAGE,
    Code.SEND_REPLY_MESSAGE,
    Code.SEND_REPLY_MESSAGE_V2,
    Code.CHECK_CLIENT_CONFIG,
    Code.QUERY_ASSIGNMENT,
    Code.SET_MESSAGE_REQUEST_MODE,
    # consumers of POP and of lite topics
    Code.BATCH_ACK_MESSAGE,
    Code.POP_ROLLBACK,
    Code.POP_LITE_MESSAGE,
    Code.LITE_SUBSCRIPTION_CTL,
    Code.GET_PARENT_TOPIC_INFO,
    Code.GET_LITE_TOPIC_INFO,
    Code.GET_LITE_CLIENT_INFO,
    Code.GET_LITE_GROUP_INFO,
    Code.TRIGGER_LITE_DISPATCH,
}

#: Codes that Apache's broker does not serve, and says so to each user that it knows. TriMQ's refuses them.
UNKNOWN_TO_APACHE = {
    Code.QUERY_BROKER_OFFSET,
    Code.GET_TOPIC_CONFIG_LIST,
    Code.GET_TOPIC_NAME_LIST,
    Code.TRIGGER_DELETE_FILES,
    Code.GET_CLIENT_CONFIG,
    Code.SUSPEND_CONSUMER,
    Code.RESUME_CONSUMER,
    Code.RESET_CONSUMER_OFFSET_IN_CONSUMER,
    Code.RESET_CONSUMER_OFFSET_IN_BROKER,
    Code.ADJUST_CONSUMER_THREAD_POOL,
    Code.WHO_CONSUME_THE_MESSAGE,
    Code.REGISTER_FILTER_SERVER,
    Code.REGISTER_MESSAGE_FILTER_CLASS,
    Code.ACK_LITE_MESSAGE,
    Code.AUTH_GET_FILE,
}

#: What Apache's broker refuses to a user with exactly what TriMQ's needs.
STRICTER_IN_APACHE = {
    Code.HEART_BEAT,  # with a blank topic among the subscriptions, which some clients send
    Code.QUERY_CORRECTION_OFFSET,  # it needs the groups that are to be left out too
    # it looks at the cluster that the request names; TriMQ's always at its own
    Code.QUERY_DATA_VERSION,
    Code.GET_BROKER_MEMBER_GROUP,
    Code.BROKER_HEARTBEAT,
}


@dataclass(frozen=True)
class Verdicts:
    """The codes that a broker refuses to a user without policies, and those to a user with exactly the needed ones."""

    refused: frozenset[int]
    refused_in_spite: frozenset[int]


def refuses(broker: str, code: int, case: Case, user: probe.Credentials) -> bool:
    command = case.command(code)
    access = probe.Access(None, user)
    try:
        reply = probe.call(broker, code, dict(command.ext or {}), bytes(command.body), 5.0, access)
    except TimeoutError:
        return False
    return reply.code == NO_PERMISSION and any(text in reply.remark for text in REFUSALS)


def granted(need: str, at: int) -> tuple[str, str]:
    """The resource of a need, and one of the actions that satisfy it."""
    resource, actions = need.replace(CLUSTER, "DefaultCluster").split()
    return resource, actions.split("|")[at]


def verdicts(cluster: Cluster) -> Verdicts:
    broker = cluster.broker.address
    stranger = create_user(broker, "stranger", SECRET)
    refused, in_spite = set(), set()
    for code in sorted(set(CASES) - ELSEWHERE):
        case = CASES[code]
        if refuses(broker, code, case, stranger):
            refused.add(int(code))
        # Of several actions one is enough: each request is sent with the first of them, and with the last.
        for number, needs in enumerate({tuple(granted(need, at) for need in case.needs) for at in (0, -1)}):
            user = create_user(broker, f"user-{int(code)}-{number}", SECRET)
            for resource, action in needs:
                allow(broker, user.access_key, resource, [action])
            if refuses(broker, code, case, user):
                in_spite.add(int(code))
    return Verdicts(frozenset(refused), frozenset(in_spite))


@pytest.fixture(scope="module", params=["trimq", "apache"])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Verdicts]]:
    peer: Peer = request.param
    directory = tmp_path_factory.mktemp(f"table-{peer}")
    with running_cluster(directory, peer=peer, security=secured(access_control=True)) as cluster:
        yield peer, verdicts(cluster)


def test_users_may_do_what_their_policies_say(judged: tuple[Peer, Verdicts]) -> None:
    peer, seen = judged
    codes = {int(code) for code in set(CASES) - ELSEWHERE}
    if peer == "apache":
        assert codes - seen.refused == OPEN_IN_APACHE | UNKNOWN_TO_APACHE
        assert seen.refused_in_spite == STRICTER_IN_APACHE
    else:
        assert codes - seen.refused == set()
        assert seen.refused_in_spite == set()


def test_the_guide_lists_the_differences() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    looser = re.search(r"without a policy; here they need what the\s+table says: ([\d,\s]+)\.", guide)
    stricter = re.search(
        r"These it refuses to a user who may do here what the request asks for: (.*?)\.\n", guide, re.DOTALL
    )
    assert looser
    assert stricter
    assert {int(code) for code in looser[1].split(",")} == OPEN_IN_APACHE
    assert {int(code) for code in re.findall(r"\d+", stricter[1])} == STRICTER_IN_APACHE
