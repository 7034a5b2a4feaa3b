"""Networks of a configuration."""

import pytest

from trimq.remoting.config.networks import is_in, names_everybody, parse_networks


def test_several() -> None:
    found = parse_networks(" 10.0.0.1; 10.1.0.0/16;;fd00::/8 ", ";")
    assert [str(one) for one in found] == ["10.0.0.1/32", "10.1.0.0/16", "fd00::/8"]
    assert parse_networks("", ",") == ()


@pytest.mark.parametrize("text", ["10.0.0.1/8", "here", "10.0.0.1,10.0.0.2", "::ffff:10.0.0.1/104"])
def test_what_is_no_network(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not appear|has host bits"):
        parse_networks(text, ";")


@pytest.mark.parametrize("text", ["10.0.0.0/8", "::ffff:10.0.0.0/104"])
@pytest.mark.parametrize("form", ["{}", "::ffff:{}"])
def test_both_forms_of_an_ipv4_address_are_one(text: str, form: str) -> None:
    networks = parse_networks(text, ";")
    assert is_in(form.format("10.1.2.3"), networks)
    assert not is_in(form.format("11.1.2.3"), networks)


def test_zones_and_what_is_no_address() -> None:
    networks = parse_networks("fe80::/10", ";")
    assert is_in("fe80::1%eth0", networks)
    assert not is_in("a name", networks)
    assert not is_in("", ())


@pytest.mark.parametrize(
    ("text", "everybody"),
    [
        ("0.0.0.0/0", True),
        ("::/0", True),
        ("::ffff:0:0/96", True),
        ("0.0.0.0/1;10.0.0.1;128.0.0.0/1", True),
        ("::/1;8000::/1", True),
        ("0.0.0.0/1;fd00::/8", False),
        ("", False),
    ],
)
def test_who_names_everybody(text: str, everybody: bool) -> None:
    assert names_everybody(parse_networks(text, ";")) == everybody
