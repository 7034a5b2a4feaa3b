"""The layout of the file with users and policies."""

import hashlib
import hmac
import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimq.protocol.auth import auth_file
from trimq.protocol.auth.auth_file import AuthFileError, decode, encode, is_encrypted, seal_of, version_of
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import MAX_FRAME, encode_head
from trimq.protocol.hashing import checksum

USERS = [b'{"username":"a"}', b'{"username":"b"}']
ACLS = [b'{"subject":"User:a"}']


class Keys:
    """Keys by name, the last of which seals."""

    def __init__(self, *ids: str) -> None:
        self._ids = ids
        self.first_id = ids[-1]

    def seal(self, key_id: str, data: bytes) -> str | None:
        return hmac.new(key_id.encode(), data, hashlib.sha256).hexdigest() if key_id in self._ids else None


def test_a_file_is_read_as_it_was_written() -> None:
    for users, acls in [(USERS, ACLS), ([], [])]:
        expected = list(map(json.loads, users)), list(map(json.loads, acls))
        assert decode(encode(7, users, acls, None), None) == (7, False, *expected, None)
        sealed = encode(8, users, acls, Keys("k1"))
        assert decode(sealed, Keys("k1", "k2")) == (8, True, *expected, "k1")
        assert is_encrypted(sealed)
        assert not is_encrypted(encode(7, users, acls, None))


def test_the_text_is_the_documented_one() -> None:
    front = b'{"format":1,"secrets":"clear","version":1,\n"users":[\n{"username":"a"}\n],\n"acls":[\n\n]'
    assert encode(1, USERS[:1], [], None) == front + b',\n"seal":{"crc":%d}}\n' % checksum(front)


@pytest.mark.parametrize("keys", [None, Keys("k1")])
def test_every_changed_byte_is_found(keys: Keys | None) -> None:
    data = encode(7, USERS, ACLS, keys)
    chosen = random.Random(1)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= chosen.choice([1, 2, 4, 8, 16, 32, 64, 128])
        with pytest.raises(AuthFileError):
            decode(bytes(damaged), keys)
    for length in range(len(data)):
        with pytest.raises(AuthFileError):
            decode(data[:length], keys)


SEALED = encode(7, USERS, ACLS, Keys("k1"))
IN_CLEAR = encode(7, USERS, ACLS, None)
MEMBERS = [
    b',"users":[{"username":"a","userType":"Super"}]',
    b',\n"users":[]',
    b',"acls":[]',
    b',"version":9',
    b',"format":1',
    b',"secrets":"clear"',
]


def parts_of(data: bytes) -> tuple[bytes, bytes]:
    """What is sealed, and the JSON of the seal."""
    front, _, rest = data.partition(b',\n"seal":')
    return front, rest.removesuffix(b"}\n")


def is_refused(data: bytes, keys: Keys | None) -> None:
    for read in (lambda: decode(data, keys), lambda: version_of(data)):
        with pytest.raises(AuthFileError):
            read()
    assert (is_encrypted(data), seal_of(data)) == (False, "")


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(("data", "keys"), [(SEALED, Keys("k1")), (IN_CLEAR, None)], ids=["sealed", "clear"])
def test_only_what_is_sealed_counts(data: bytes, keys: Keys | None, member: bytes) -> None:
    """A later member of a name replaces an earlier one, and these are not covered: anybody could have written them."""
    front, seal = parts_of(data)
    assert front + b',\n"seal":' + seal + b"}\n" == data
    for changed in (
        front + b',\n"seal":' + seal + member + b"}\n",  # behind the seal
        front + b',\n"seal":' + seal[:-1] + member + b"}}\n",  # in it
        front + b',\n"seal":{' + member[1:] + b"," + seal[1:] + b"}\n",
        front + b',\n"seal":' + seal + member + b',\n"seal":' + seal + b"}\n",  # before a second one
        front + b',\n"seal":' + seal + b',\n"seal":' + seal + member + b"}\n",
        front + b',\n"seal":' + seal + b',\n"seal":{}}\n',
        data + data.replace(b'"version":7', b'"version":9'),
        data + b"{" + member[1:] + b"}\n",
        data + b"\n",
        data[:-1],
        data[:-1] + b" ",
    ):
        is_refused(changed, keys)


def test_a_seal_of_the_other_kind_is_none() -> None:
    front, seal = parts_of(SEALED)
    other = parts_of(IN_CLEAR)[0]
    is_refused(front + b',\n"seal":{"crc":%d}}\n' % checksum(front), Keys("k1"))
    is_refused(other + b',\n"seal":' + seal + b"}\n", Keys("k1"))
    # All that is used is of the part that is sealed.
    assert (is_encrypted(SEALED), version_of(SEALED), seal_of(SEALED)) == (True, 7, seal[:-1].decode())
    assert (is_encrypted(IN_CLEAR), seal_of(IN_CLEAR)) == (False, "")
    with pytest.raises(AuthFileError, match="its secrets are not encrypted"):
        version_of(IN_CLEAR)


PIECES = st.one_of(
    st.sampled_from([*MEMBERS, b"}", b"}\n", b",", b" ", b"\n", b',\n"seal":{}', b',\n"seal":']),
    st.tuples(st.integers(0, len(SEALED)), st.integers(0, len(SEALED))).map(lambda ends: SEALED[min(ends) : max(ends)]),
    st.binary(max_size=8),
)
PLACES = st.one_of(st.integers(0, len(SEALED)), st.integers(len(parts_of(SEALED)[0]), len(SEALED)))


@given(PLACES, PLACES, st.lists(PIECES, max_size=4))
@example(len(SEALED) - 2, len(SEALED) - 2, [MEMBERS[0]])
@example(len(SEALED) - 3, len(SEALED) - 3, [MEMBERS[0]])
def test_no_change_without_the_key_changes_the_tables(begin: int, end: int, pieces: list[bytes]) -> None:
    changed = SEALED[: min(begin, end)] + b"".join(pieces) + SEALED[max(begin, end) :]
    try:
        found = decode(changed, Keys("k1"))
    except AuthFileError:
        return
    assert found == decode(SEALED, Keys("k1"))


def test_a_seal_cannot_be_made_without_the_key() -> None:
    sealed = encode(7, USERS, ACLS, Keys("k1"))
    changed = sealed.replace(b'"username":"a"', b'"username":"c"')
    with pytest.raises(AuthFileError, match="its seal is wrong"):
        decode(changed, Keys("k1"))
    front = changed.rpartition(b',\n"seal":')[0]
    with pytest.raises(AuthFileError, match="it has no seal"):
        decode(front + b',\n"seal":{"crc":%d}}\n' % checksum(front), Keys("k1"))


@pytest.mark.parametrize(
    ("data", "keys", "text"),
    [
        (b"", None, "it is damaged: not the JSON of users and policies"),
        (b"\0" * 100, None, "it is damaged: not the JSON of users and policies"),
        (b"[]", None, "it is damaged: not the JSON of users and policies"),
        (b'{"format":2}', None, "it has format 2; this version of TriMQ reads format 1"),
        (b'{"format":1}', None, "it is damaged: it has no seal"),
        (b'{"format":1,\n"seal":{}}', None, "it is damaged: it has no seal"),
        (b'{"format":1,"secrets":"clear","version":1,\n"seal":5}', None, "it is damaged: it has no seal"),
        (
            b'{"format":1,"secrets":"clear","version":1,\n"seal":{"crc":5}}\n',
            None,
            "it is damaged: its checksum is another",
        ),
        (b'{"format":1,"secrets":"encrypted","version":1,\n"seal":{"crc":5}}\n', None, "it is damaged: it has no seal"),
        (
            encode(1, USERS, [], Keys("k1")),
            None,
            "its secrets are encrypted with key 'k1': set authKeyFile to the file that has this key",
        ),
        (
            encode(1, USERS, [], Keys("k1")),
            Keys("k2"),
            "its secrets are encrypted with key 'k1', which is not in authKeyFile: add that key there",
        ),
        (b" " * (auth_file.MOST_READ_BYTES + 1), None, "it has 16781313 bytes; 16781312 are allowed"),
    ],
)
def test_files_that_are_refused(data: bytes, keys: Keys | None, text: str) -> None:
    with pytest.raises(AuthFileError) as caught:
        decode(data, keys)
    assert str(caught.value) == text


def test_other_tables_are_refused() -> None:
    for front, text in (
        (b'{"format":1,"secrets":"clear","version":true,\n"users":[],"acls":[]', "it has no tables"),
        (b'{"format":1,"secrets":"clear","version":1,\n"users":[,"acls":[]', "not the JSON of users and policies"),
    ):
        with pytest.raises(AuthFileError, match=text):
            decode(front + b',\n"seal":{"crc":%d}}\n' % checksum(front), None)
    with pytest.raises(AuthFileError, match="it has no version"):
        version_of(SEALED.replace(b'"version":7', b'"version":"7"'))


def test_a_file_that_would_be_too_large_is_not_made() -> None:
    with pytest.raises(AuthFileError, match=r"would take 168\d+ bytes, and slaves can take 16711680: delete users or"):
        encode(1, [b'"%s"' % (b"x" * 1024)] * (16 * 1024), [], None)


def test_the_largest_file_fits_into_a_reply() -> None:
    """Otherwise users would be acknowledged that no slave could get."""
    keys = Keys("k1")
    overhead = len(encode(1, [b'""'], [], keys).rpartition(b',\n"seal":')[0])
    room = auth_file.MOST_AUTH_BYTES - overhead
    with pytest.raises(AuthFileError, match="delete users or policies"):
        encode(1, [b'"%s"' % (b"x" * (room + 1))], [], keys)
    data = encode(1, [b'"%s"' % (b"x" * room)], [], keys)
    head = encode_head(RemotingCommand.request(13010).reply(remark="r" * 1000), len(data))
    assert len(data) > auth_file.MOST_AUTH_BYTES
    assert len(head) + len(data) < MAX_FRAME
    assert decode(data, keys).encrypted
