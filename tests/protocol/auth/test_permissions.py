"""The table of permissions: complete, and with the names that handlers use."""

import json
import re
from typing import Any

import pytest

from tests.broker.auth.requests import CASES, CLUSTER, HEARTBEAT, PULL, SEND, SEND_V2, case
from trimq.protocol import lenient_json
from trimq.protocol.auth import permissions, rules
from trimq.protocol.auth.model import Action, Resource, ResourcePattern
from trimq.protocol.auth.permissions import ADMINISTRATION, BETWEEN_SERVERS, MOST_NEEDS, TABLE, TO_CLIENTS, needs
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError

CHANGES = {Action.CREATE, Action.UPDATE, Action.DELETE}


def shown(command: RemotingCommand) -> set[str]:
    found = list(needs(command, CLUSTER))
    return {f"{resource.key} {'|'.join(action.value for action in actions)}" for resource, actions in found}


def refusal(command: RemotingCommand) -> str:
    with pytest.raises(RemotingError) as caught:
        list(needs(command, CLUSTER))
    assert caught.value.code == ResponseCode.NO_PERMISSION
    return caught.value.remark


@pytest.mark.parametrize("code", [pytest.param(code, id=code.name) for code in RequestCode])
def test_every_code_has_an_entry_unless_only_clients_get_it(code: RequestCode) -> None:
    assert (code in TABLE) != (code in TO_CLIENTS)
    assert (code in CASES) == (code in TABLE)


@pytest.mark.parametrize("code", sorted(CASES))
def test_needs(code: int) -> None:
    assert shown(CASES[code].command(code)) == set(CASES[code].needs)


@pytest.mark.parametrize("topic", [None, " ", "RMQ_SYS_TRANS_HALF_TOPIC"])
def test_the_end_of_a_transaction_that_names_no_topic_of_its_own(topic: str | None) -> None:
    """The handler asks for the topic of the half."""
    ext = CASES[RequestCode.END_TRANSACTION].command(RequestCode.END_TRANSACTION).ext_fields() | {"topic": topic}
    named = {name: value for name, value in ext.items() if value is not None}
    assert shown(RemotingCommand(RequestCode.END_TRANSACTION, ext=named)) == set()


@pytest.mark.parametrize("code", [*sorted(TO_CLIENTS), 0, 1, 16, 9999, -1, 2**31])
def test_a_code_without_an_entry_is_denied(code: int) -> None:
    assert refusal(RemotingCommand(code, ext={})) == (
        f"authorization context is empty: the request code {code} has no entry."
    )


@pytest.mark.parametrize("code", sorted(CASES))
def test_what_changes_something_is_of_an_administrator_a_server_or_a_consumer(code: int) -> None:
    found = list(needs(CASES[code].command(code), CLUSTER))
    changes = any(set(actions) <= CHANGES for _, actions in found)
    known = code in ADMINISTRATION or code in BETWEEN_SERVERS
    never_served = code in range(209, 215) or code in (22, 23, 27, 47)
    if changes:
        assert known or never_served
    assert not (code in ADMINISTRATION and code in BETWEEN_SERVERS)


def test_what_manages_users_is_administration_also_when_it_only_reads() -> None:
    assert set(range(3001, 3011)) <= ADMINISTRATION


BY_NAME = sorted(code for code, case in CASES.items() if ":*" not in case.needs[0] and "Cluster:" not in case.needs[0])


@pytest.mark.parametrize("code", BY_NAME)
def test_what_cannot_be_read_is_refused(code: int) -> None:
    command = CASES[code].command(code)
    command.ext, command.body = {}, b"{"
    assert refusal(command) == "parse authorization context error."


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_blank_names_are_refused(blank: str) -> None:
    for code, ext in ((310, SEND_V2 | {"b": blank}), (10, SEND | {"topic": blank}), (11, PULL | {"topic": blank})):
        assert refusal(case(**ext).command(code)) == "parse authorization context error."
    assert refusal(case(**PULL | {"consumerGroup": blank}).command(11)) == "parse authorization context error."
    beat = {"clientID": "c", "consumerDataSet": [{"groupName": blank}]}
    assert refusal(case(body=beat).command(34)) == "parse authorization context error."


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_a_blank_topic_in_a_heartbeat_asks_for_nothing(blank: str) -> None:
    """Some official clients send it (issue 11082 of RocketMQ); no message has that topic."""
    subscriptions = [{"topic": blank, "subString": "*"}, {"topic": "X", "subString": "*"}]
    beat = {"clientID": "c", "consumerDataSet": [{"groupName": "A", "subscriptionDataSet": subscriptions}]}
    assert shown(case(body=beat).command(34)) == {"Group:A Sub", "Topic:X Sub"}


def retry(code: int, **ext: object) -> set[str]:
    return shown(case(**ext).command(code))


def test_to_send_to_a_retry_topic_is_what_members_of_its_group_do() -> None:
    # The producer's group, which the client chooses, has no part in it.
    assert retry(310, **SEND_V2 | {"a": "Mine", "b": "%RETRY%G"}) == {"Group:G Sub"}
    assert retry(10, **SEND | {"producerGroup": "Mine", "topic": "%RETRY%G"}) == {"Group:G Sub"}
    assert retry(310, **SEND_V2 | {"b": "%DLQ%G"}) == {"Topic:%DLQ%G Pub"}


def test_other_requests_about_a_retry_topic_are_about_its_group() -> None:
    assert retry(30, topic="%RETRY%G", queueId=0) == {"Group:G Get"}
    assert retry(215, topic="%RETRY%G") == {"Group:G Delete"}
    assert retry(105, topic="%RETRY%G") == {"Group:G Pub|Sub|Get"}


@pytest.mark.parametrize("code", [11, 361, 14, 15, 36, 309])
def test_a_consumer_needs_nothing_else_for_its_own_retry_topic_and_gets_no_other(code: int) -> None:
    ext = {name: value.replace("T", "%RETRY%G") if value == "T" else value for name, value in CASES[code].ext.items()}
    own = {need for need in CASES[code].needs if need.startswith("Group:")}
    assert shown(case(**ext).command(code)) == own
    other = {name: "%RETRY%Other" if value == "%RETRY%G" else value for name, value in ext.items()}
    assert refusal(case(**other).command(code)) == "the topic %RETRY%Other is not the retry topic of the group G."


@pytest.mark.parametrize("code", [34, 41, 42, 46, 400, 401])
def test_the_same_in_bodies(code: int) -> None:
    text = json.dumps(CASES[code].body).replace('"T"', '"%RETRY%G"')
    own = {need for need in CASES[code].needs if need.startswith("Group:")}
    assert shown(case(body=text.encode()).command(code)) == own
    other = text.replace("%RETRY%G", "%RETRY%Other").encode()
    assert refusal(case(body=other).command(code)) == "the topic %RETRY%Other is not the retry topic of the group G."


def test_heartbeats_in_fastjsons_form_with_many_groups() -> None:
    body = b'{clientID:"c",consumerDataSet:[{groupName:"A",subscriptionDataSet:[{topic:"X",subString:null}]},'
    body += b'{groupName:"B",subscriptionDataSet:[{topic:"X"},{topic:"Y"}]}],withoutSub:true}'
    assert shown(case(body=body).command(34)) == {"Group:A Sub", "Topic:X Sub", "Group:B Sub", "Topic:Y Sub"}
    assert shown(case(body=HEARTBEAT | {"consumerDataSet": []}).command(34)) == set()


def test_without_an_optional_name() -> None:
    transaction = {name: value for name, value in CASES[37].ext.items() if name != "topic"}
    assert shown(case(**transaction).command(37)) == set()  # RocketMQ 4's clients
    assert shown(case(clientID="c", producerGroup="P").command(35)) == set()
    assert shown(case(srcGroup="S", destGroup="G").command(314)) == {"Group:S Get", "Group:G Update", "Topic:* Update"}
    assert shown(case(consumerGroup="G").command(208)) == {"Group:G Get"}
    assert shown(case(topic="T", compareGroup=" ").command(308)) == {"Topic:T Get"}
    assert shown(case(body={"group": "G"}).command(46)) == {"Group:G Sub"}


def test_a_list_of_topics_counts_as_in_the_handler() -> None:
    found = shown(case(consumerGroup="G", topic="T", topicList=" A ;B;;").command(208))
    assert found == {"Group:G Get", "Topic:A Get", "Topic:B Get"}


def test_a_message_sent_back_names_where_it_comes_from() -> None:
    assert refusal(case(offset=0, group="G", delayLevel=0).command(36)) == "parse authorization context error."


def test_a_record_is_read_by_the_name_of_its_topic() -> None:
    assert refusal(case(offset=0).command(33)) == "parse authorization context error."


def test_a_name_with_a_star_asks_for_that_name_only() -> None:
    ((resource, _),) = needs(case(topic="*", queueId=0).command(30), CLUSTER)
    assert (resource.pattern, resource.name) == (ResourcePattern.LITERAL, "*")


def test_the_template_topic_and_the_trace_topic_need_entries_of_their_own() -> None:
    for topic in ("TBW102", "RMQ_SYS_TRACE_TOPIC"):
        assert retry(105, topic=topic) == {f"Topic:{topic} Pub|Sub|Get"}
        assert retry(310, **SEND_V2 | {"b": topic}) == {f"Topic:{topic} Pub"}


def test_numbers_for_text_are_read_as_the_handlers_read_them() -> None:
    ext: dict[str, Any] = {"topic": 17, "queueId": 0}
    assert {key for (resource, _) in needs(RemotingCommand(30, ext=ext), CLUSTER) for key in [resource.key]} == {
        "Topic:17"
    }


def heartbeat_of(topics: int) -> RemotingCommand:
    subscriptions = [{"topic": f"T{number}"} for number in range(topics)]
    body = HEARTBEAT | {"consumerDataSet": [{"groupName": "G", "subscriptionDataSet": subscriptions}]}
    return case(body=body).command(34)


def test_the_first_need_that_is_refused_ends_the_work() -> None:
    found = needs(heartbeat_of(MOST_NEEDS + 1000), CLUSTER)
    assert next(found).resource == Resource.group("G")
    assert len([next(found) for _ in range(MOST_NEEDS - 1)]) == MOST_NEEDS - 1
    with pytest.raises(RemotingError, match=f"a request may name {MOST_NEEDS} topics and groups"):
        next(found)
    assert len(list(needs(heartbeat_of(MOST_NEEDS - 1), CLUSTER))) == MOST_NEEDS


@pytest.mark.parametrize(
    ("code", "name", "key"), [(18, "topicConfigList", "topicName"), (225, "groupConfigList", "groupName")]
)
def test_the_first_of_a_list_that_is_refused_ends_the_work(
    code: int, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def noted(own: str | None, actions: tuple[Action, ...]) -> rules.Need:
        asked.append(own)
        return rules.on_topic(own, actions)

    for function in ("on_topic", "on_group"):
        monkeypatch.setattr(permissions, function, noted)
    command = RemotingCommand(code, body=json.dumps({name: [{key: f"n{number}"} for number in range(9)]}).encode())
    next(iter(needs(command, CLUSTER)))
    assert asked == ["n0"]


@pytest.mark.parametrize("code", [18, 34, 41, 42, 46, 200, 225, 400, 401])
def test_long_bodies_are_not_read(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may do nothing could stop the server for 30 s with one of 16 MB."""
    text = json.dumps(CASES[code].body)
    whole = RemotingCommand(code, body=text.ljust(rules.MOST_BODY).encode())
    assert list(needs(whole, CLUSTER))
    assert "the body may have" in refusal(RemotingCommand(code, body=whole.body + b" "))
    bare = re.sub(r'"(\w+)":', r"\1:", text)  # as fastjson may write it: a hundred times slower
    assert list(needs(RemotingCommand(code, body=bare.ljust(rules.MOST_LENIENT).encode()), CLUSTER))
    refused = RemotingCommand(code, body=bare.ljust(rules.MOST_LENIENT + 1).encode())
    monkeypatch.setattr(lenient_json, "loads", None)
    assert refusal(refused) == rules.CANNOT_READ
