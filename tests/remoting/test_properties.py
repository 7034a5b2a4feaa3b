import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.remoting.config import properties
from trimq.remoting.config.properties import ConfigError, Entry, escape, parse, replace_values


def values(text: str) -> dict[str, str]:
    return {entry.key: entry.value for entry in parse(text)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", {"a": "b"}),
        ("a = b ", {"a": "b"}),
        ("  a:b", {"a": "b"}),
        ("a b c", {"a": "b c"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("# c\n! d\n\n  # e\na=1", {"a": "1"}),
        ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
        ("a=1,\\\n   2,\\\n\t3", {"a": "1,2,3"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\", {"a": "1"}),
        ("a=\\u0041\\tB\\qC", {"a": "A\tBqC"}),
        ("a=\\uD83D\\uDE00", {"a": "\U0001f600"}),
        ("a\\=b\\:c\\ d=e=f", {"a=b:c d": "e=f"}),
        ("a==b", {"a": "=b"}),
        ("a=#b", {"a": "#b"}),
        ("# c \\\na=1", {"a": "1"}),
        ("a=\\\n# no comment", {"a": "# no comment"}),
    ],
)
def test_reads_what_java_reads(text: str, expected: dict[str, str]) -> None:
    assert values(text) == expected


def test_entries_know_their_lines() -> None:
    assert parse("# c\na=1\\\n 2\n\nb=3\n") == [Entry("a", "12", 2, 3), Entry("b", "3", 5, 5)]


@pytest.mark.parametrize("text", ["a=\\u12", "a=\\u12G4", "a=\\u", "a=\\u 123"])
def test_a_broken_escape_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.conf:2"):
        parse("b=1\n" + text, "f.conf")


def test_bytes_are_utf8_or_latin1() -> None:
    assert properties.decode("\ufeffa=ü".encode()) == "a=ü"
    assert properties.decode("a=ü".encode("latin-1")) == "a=ü"


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x0b\x85\u2028"))


@given(st.dictionaries(TEXT.filter(bool), TEXT))
def test_what_is_escaped_is_read_back(wanted: dict[str, str]) -> None:
    text = "".join(f"{escape(key, key=True)}={escape(value)}\n" for key, value in wanted.items())
    assert values(text) == wanted


@given(TEXT)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        entries = parse(text)
    except ConfigError:
        return
    assert all(entry.line <= entry.last_line for entry in entries)


def test_values_are_replaced_in_place() -> None:
    text = "# who\nname=a\n\nlist=1,\\\n  2\n# end\nname=b\n"
    changed = replace_values(text, {"name": "c d", "list": "x", "new": "y"})
    assert changed == "# who\nname=c d\n\nlist=x\n# end\nname=c d\nnew=y\n"
    assert replace_values("", {"a": "1"}) == "a=1\n"


@given(st.dictionaries(st.sampled_from("abcd"), TEXT), st.dictionaries(st.sampled_from("cdef"), TEXT))
def test_after_replacing_the_new_values_count(before: dict[str, str], changes: dict[str, str]) -> None:
    text = "".join(f"{key}={escape(value)}\n" for key, value in before.items())
    assert values(replace_values(text, changes)) == before | changes
