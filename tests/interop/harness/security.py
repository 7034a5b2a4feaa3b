"""TLS and access control (ACL 2.0) for the servers and clients of the tests, the same for both peers.

Apache's servers take the keys of TLS as system properties of their JVM, TriMQ's from the configuration file.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.canary import permit
from tests.interop.harness import probe
from tests.tls_certificates import Certificates, KeyPair

TlsMode = Literal["permissive", "enforcing", "mutual"]

#: The administrator of the brokers with access control, and the user that signs what brokers send.
ADMINISTRATOR = probe.Credentials("administrator", "canary-of-an-administrator")
INNER = probe.Credentials("inner-client", "canary-of-an-inner-client")

CREATE_USER = 3001
CREATE_ACL = 3006

_METADATA = "org.apache.rocketmq.auth.{0}.provider.Local{1}MetadataProvider"

#: The keys of access control that both peers know.
ACCESS_CONTROL = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "authenticationMetadataProvider": _METADATA.format("authentication", "Authentication"),
    "authorizationMetadataProvider": _METADATA.format("authorization", "Authorization"),
    "initAuthenticationUser": json.dumps({"username": ADMINISTRATOR.access_key, "password": ADMINISTRATOR.secret_key}),
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": INNER.access_key, "secretKey": INNER.secret_key}),
}

#: The key of TriMQ's broker without which plain connections are not good enough for administrators, as for Apache's.
OURS = {"allowAdminOverPlain": "true"}

#: The beginning of each password here. TriMQ's servers write no password anywhere.
CANARY = b"canary-of-"


@dataclass(frozen=True)
class Security:
    """How the servers of a cluster are protected, and how the harness itself speaks to them."""

    tls: Mapping[str, str] = field(default_factory=dict)
    access_control: bool = False
    access: probe.Access = field(default_factory=probe.Access)
    in_clear: bool = False
    """TriMQ's broker has no key file: for environments without trimq[security]."""

    def settings(self, peer: str) -> Mapping[str, str]:
        """The keys of a configuration file for TLS."""
        return self.tls if peer == "trimq" else {}

    def broker_settings(self, peer: str, directory: Path) -> Mapping[str, str]:
        """The keys of a broker's configuration file for access control. TriMQ's has a key file in ``directory``."""
        if not self.access_control:
            return {}
        if peer == "apache":
            return ACCESS_CONTROL
        if self.in_clear:
            return {**ACCESS_CONTROL, **OURS, "allowSecretsInClear": "true"}
        key_file = directory / "auth.keys"
        if not key_file.exists():
            key_file.touch(mode=0o600)
            key_file.write_text(f"{secrets.token_hex(32)}\n", encoding="ascii")
        return {**ACCESS_CONTROL, **OURS, "authKeyFile": str(key_file)}


#: No TLS and no access control, as by default.
OPEN = Security()


def secured(
    certificates: Certificates | None = None, mode: TlsMode | None = None, *, access_control: bool = False
) -> Security:
    """Servers with TLS in a mode, with access control, or both; ``mutual`` is enforcing with client certificates."""
    user = ADMINISTRATOR if access_control else probe.Credentials()
    if certificates is None or mode is None:
        return Security({}, access_control, probe.Access(None, user))
    tls = {
        "tls.server.mode": "permissive" if mode == "permissive" else "enforcing",
        "tls.test.mode.enable": "false",
        "tls.server.certPath": str(certificates.server.cert),
        "tls.server.keyPath": str(certificates.server.key),
        **_client_keys(certificates, certificates.client),
    }
    if mode == "mutual":
        tls["tls.server.need.client.auth"] = "require"
        tls["tls.server.authClient"] = "true"
        tls["tls.server.trustCertPath"] = str(certificates.ca)
    context = certificates.client_context(certificates.client)
    return Security(tls, access_control, probe.Access(context, user))


def _client_keys(certificates: Certificates, pair: KeyPair | None) -> dict[str, str]:
    keys = {"tls.client.authServer": "true", "tls.client.trustCertPath": str(certificates.ca)}
    if pair is not None:
        keys |= {"tls.client.certPath": str(pair.cert), "tls.client.keyPath": str(pair.key)}
    return keys


def java_properties(properties: Mapping[str, str]) -> tuple[str, ...]:
    """System properties as options of a JVM."""
    return tuple(f"-D{key}={value}" for key, value in properties.items())


def java_client_options(certificates: Certificates, pair: KeyPair | None) -> tuple[str, ...]:
    """Options of a JVM whose RocketMQ clients use TLS and verify the servers; ``pair`` is their certificate."""
    keys = {"tls.enable": "true", "tls.test.mode.enable": "false", **_client_keys(certificates, pair)}
    return java_properties(keys)


def tools_file(home: Path, user: probe.Credentials) -> None:
    """Write the file from which mqadmin takes its credentials; ``home`` is rocketmq.home.dir."""
    conf = home / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    permit(conf / "tools.yml")
    (conf / "tools.yml").write_text(f"accessKey: {user.access_key}\nsecretKey: {user.secret_key}\n", encoding="utf-8")


def create_user(broker: str, name: str, password: str) -> probe.Credentials:
    """Create a user without any policy."""
    body = {"username": name, "password": password, "userType": "Normal"}
    probe.ask(broker, CREATE_USER, {"username": name}, json.dumps(body).encode())
    return probe.Credentials(name, password)


def allow(broker: str, user: str, resource: str, actions: Sequence[str], decision: str = "Allow") -> None:
    """Add one entry to a user's policy."""
    entry = {"resource": resource, "actions": list(actions), "decision": decision}
    body = {"subject": f"User:{user}", "policies": [{"policyType": "Custom", "entries": [entry]}]}
    probe.ask(broker, CREATE_ACL, {"subject": f"User:{user}"}, json.dumps(body).encode())


def files_with_secrets(directory: Path) -> list[Path]:
    """The files below a server's directory that contain a password, without the configuration that the tests wrote."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".conf")
    return [path for path in files if CANARY in path.read_bytes()]
