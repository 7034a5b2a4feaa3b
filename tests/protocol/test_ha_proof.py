"""Proofs of master and slave: what is accepted, and what is not, bit by bit."""

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.ha_frames import ReportDecoder
from trimq.protocol.ha_proof import (
    ANSWER_BYTES,
    CHALLENGE,
    CHALLENGE_BYTES,
    HELLO,
    NONCE_BYTES,
    PROOF_BYTES,
    HAProofError,
    MasterProof,
    SlaveProof,
)

KEYS = {b"one!": b"1" * 32}
OLD = {b"old!": b"0" * 32}


def exchange(master: MasterProof, slave: SlaveProof) -> None:
    answer = slave.answer(master.challenge())
    assert len(master.challenge()) == CHALLENGE_BYTES
    assert len(answer) == ANSWER_BYTES
    proof = master.verify(answer)
    assert len(proof) == PROOF_BYTES
    slave.verify(proof)


def test_both_know_the_secret() -> None:
    exchange(MasterProof(KEYS, "broker-a"), SlaveProof(KEYS, "broker-a"))


def test_keys_are_changed_one_after_another() -> None:
    both = OLD | KEYS
    exchange(MasterProof(both, "a"), SlaveProof(OLD, "a"))
    exchange(MasterProof(both, "a"), SlaveProof(KEYS, "a"))
    exchange(MasterProof(KEYS | OLD, "a"), SlaveProof(both, "a"))


@pytest.mark.parametrize(
    ("keys", "name"),
    [({b"one!": b"2" * 32}, "a"), ({b"two!": b"1" * 32}, "a"), (KEYS, "b"), (KEYS, ""), (KEYS, "a\0")],
)
def test_another_secret_or_another_group(keys: dict[bytes, bytes], name: str) -> None:
    with pytest.raises(HAProofError, match="the slave does not know the secret"):
        exchange(MasterProof(KEYS, "a"), SlaveProof(keys, name))


def test_the_name_of_a_key_that_is_not_known_proves_nothing() -> None:
    """The stand-in for a key that is missing is the nonce, which the slave knows."""
    master = MasterProof(KEYS, "a")
    challenge = master.challenge()
    forged = SlaveProof({b"none": challenge[len(CHALLENGE) :]}, "a").answer(challenge)
    with pytest.raises(HAProofError):
        master.verify(forged)


@given(st.integers(0, ANSWER_BYTES * 8 - 1))
def test_no_bit_of_an_answer_may_differ(bit: int) -> None:
    master, slave = MasterProof(KEYS, "a"), SlaveProof(KEYS, "a")
    answer = bytearray(slave.answer(master.challenge()))
    answer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HAProofError):
        master.verify(bytes(answer))


@given(st.integers(0, PROOF_BYTES * 8 - 1))
def test_no_bit_of_a_masters_proof_may_differ(bit: int) -> None:
    master, slave = MasterProof(KEYS, "a"), SlaveProof(KEYS, "a")
    proof = bytearray(master.verify(slave.answer(master.challenge())))
    proof[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HAProofError, match="the master does not know the secret"):
        slave.verify(bytes(proof))


def test_a_recorded_answer_fits_no_other_connection() -> None:
    master, slave = MasterProof(KEYS, "a"), SlaveProof(KEYS, "a")
    answer = slave.answer(master.challenge())
    proof = master.verify(answer)
    with pytest.raises(HAProofError):
        MasterProof(KEYS, "a").verify(answer)
    again = SlaveProof(KEYS, "a")
    again.answer(master.challenge())
    with pytest.raises(HAProofError):
        again.verify(proof)


def test_a_proof_of_one_role_is_none_of_the_other() -> None:
    """A slave whose own proof is reflected does not take it for its master's, nor a master a master's for a slave's."""
    master, slave = MasterProof(KEYS, "a"), SlaveProof(KEYS, "a")
    answer = slave.answer(master.challenge())
    with pytest.raises(HAProofError):
        slave.verify(answer[-PROOF_BYTES:])
    with pytest.raises(HAProofError):
        master.verify(answer[:-PROOF_BYTES] + master.verify(answer))


@pytest.mark.parametrize("data", [bytes(CHALLENGE_BYTES), HELLO + bytes(NONCE_BYTES), b"TRIMQHA\x02" + bytes(32)])
def test_what_is_no_challenge(data: bytes) -> None:
    with pytest.raises(HAProofError, match="no challenge"):
        SlaveProof(KEYS, "a").answer(data)


def test_the_secret_is_in_no_message_or_text() -> None:
    secret = b"canary-secret-of-the-brokers-123"
    keys = {b"key1": secret}
    master, slave = MasterProof(keys, "a"), SlaveProof(keys, "a")
    answer = slave.answer(master.challenge())
    sent = master.challenge() + answer + master.verify(answer)
    assert secret not in sent
    assert hmac.digest(secret, b"", "sha256") not in sent
    assert b"canary" not in f"{master!r}{slave!r}".encode()


def test_a_greeting_is_no_report() -> None:
    """A master without a secret refuses it, and does not take it for an offset."""
    with pytest.raises(ValueError, match="reports the offset -1"):
        ReportDecoder().feed(HELLO)
