"""Signing for callers that make their frames themselves, over connections that are not those of a Client."""

from trimq.remoting.client.credentials import Credentials, Signer

__all__ = ["Credentials", "Signer"]
