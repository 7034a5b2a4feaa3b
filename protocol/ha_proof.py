"""How a slave and a master prove to each other, before the first report, that both know a secret. Sans-IO. TriMQ's own.

| direction | bytes | meaning |
|---|---|---|
| slave to master | 8 bytes 0xFF | greeting. RocketMQ's master reads the offset -1, at which it sends nothing |
| master to slave | ``CHALLENGE``, 32 bytes | nonce of the master |
| slave to master | 4 bytes, 32 bytes, 32 bytes | name of the key, nonce of the slave, proof of the slave |
| master to slave | 32 bytes | proof of the master |

A proof is HMAC-SHA256 with the key, over the role of its sender, the name of the brokers (brokerName), both nonces and
the name of the key. So one that was recorded fits no other connection, that of one role not the other, and that of one
group of brokers no other group.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Final

HELLO: Final = b"\xff" * 8
CHALLENGE: Final = b"TRIMQHA1"
NONCE_BYTES: Final = 32
KEY_ID_BYTES: Final = 4
PROOF_BYTES: Final = 32
CHALLENGE_BYTES: Final = len(CHALLENGE) + NONCE_BYTES
ANSWER_BYTES: Final = KEY_ID_BYTES + NONCE_BYTES + PROOF_BYTES

_SLAVE: Final = b"trimq ha slave"
_MASTER: Final = b"trimq ha master"


class HAProofError(ValueError):
    """The peer does not prove that it knows the secret; the text says why, without anything of the secret."""


class MasterProof:
    """A master's side of one connection."""

    def __init__(self, keys: Mapping[bytes, bytes], name: str) -> None:
        """``keys`` by their names of 4 bytes. ``name``: the brokerName."""
        self._keys = keys
        self._name = name
        self._nonce = os.urandom(NONCE_BYTES)

    def challenge(self) -> bytes:
        """What answers HELLO."""
        return CHALLENGE + self._nonce

    def verify(self, answer: bytes) -> bytes:
        """The proof for a slave whose answer, of ANSWER_BYTES, is right. Raises HAProofError."""
        key_id, nonce = answer[:KEY_ID_BYTES], answer[KEY_ID_BYTES : KEY_ID_BYTES + NONCE_BYTES]
        known = self._keys.get(key_id)
        # Also without the key, so that names of keys cannot be tried by time.
        key = known if known is not None else self._nonce
        expected = _proof(key, _SLAVE, self._name, self._nonce, nonce, key_id)
        if not hmac.compare_digest(expected, answer[KEY_ID_BYTES + NONCE_BYTES :]) or known is None:
            raise HAProofError("the slave does not know the secret (haSecretFile), or has another brokerName")
        return _proof(key, _MASTER, self._name, self._nonce, nonce, key_id)


class SlaveProof:
    """A slave's side of one connection."""

    def __init__(self, keys: Mapping[bytes, bytes], name: str) -> None:
        """``keys``: the first one proves. ``name``: the brokerName."""
        self._key_id, self._key = next(iter(keys.items()))
        self._name = name
        self._nonce = os.urandom(NONCE_BYTES)
        self._theirs = b""

    def answer(self, challenge: bytes) -> bytes:
        """What answers a challenge of CHALLENGE_BYTES. Raises HAProofError if it is none."""
        if not challenge.startswith(CHALLENGE):
            raise HAProofError("the master sends no challenge: its haSecretFile is not set, or it is RocketMQ's")
        self._theirs = challenge[len(CHALLENGE) :]
        proof = _proof(self._key, _SLAVE, self._name, self._theirs, self._nonce, self._key_id)
        return self._key_id + self._nonce + proof

    def verify(self, proof: bytes) -> None:
        """Return if the master's proof, of PROOF_BYTES, is right. Raises HAProofError."""
        expected = _proof(self._key, _MASTER, self._name, self._theirs, self._nonce, self._key_id)
        if not hmac.compare_digest(expected, proof):
            raise HAProofError("the master does not know the secret (haSecretFile), or has another brokerName")


def _proof(key: bytes, role: bytes, name: str, master_nonce: bytes, slave_nonce: bytes, key_id: bytes) -> bytes:
    encoded = name.encode()
    content = role + b"\0" + len(encoded).to_bytes(4, "big") + encoded + master_nonce + slave_nonce + key_id
    return hmac.digest(key, content, hashlib.sha256)
