"""Names of cipher suites and versions, and what a context makes of them."""

import ssl
import subprocess

import pytest

from trimq.remoting.tls import suites

NEWEST = "TLS_AES_256_GCM_SHA384,TLS_CHACHA20_POLY1305_SHA256,TLS_AES_128_GCM_SHA256"


def offered(protocols: str, ciphers: str) -> tuple[ssl.SSLContext, set[str]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    suites.narrow(context, protocols, ciphers)
    return context, {entry["name"] for entry in context.get_ciphers()}


def test_standard_names_are_those_of_openssl() -> None:
    listed = subprocess.run(
        ["openssl", "ciphers", "-stdname", "ALL:COMPLEMENTOFALL"], capture_output=True, text=True, check=True
    )
    standard = {}
    for line in listed.stdout.splitlines():
        name, _, own = line.split()[:3]
        standard[own] = name
    entries = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).get_ciphers()
    names = [entry["name"] for entry in entries if not entry["name"].startswith("SRP-")]
    assert len(names) > 10
    assert set(names) == set(suites._suites().values())
    assert {name: suites.standard_name(name) for name in names} == {name: standard[name] for name in names}
    for other in ("AES128-GCM-SHA256", "AES256-SHA", "ECDHE-ECDSA-AES128-CCM8", "ECDHE-RSA-CAMELLIA256-SHA384"):
        assert suites.standard_name(other) == standard[other]


@pytest.mark.parametrize("name", ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "ECDHE-RSA-AES128-GCM-SHA256"])
def test_a_list_without_suites_of_tls_1_3_excludes_it(name: str) -> None:
    assert suites.ciphers_problem(name) == ""
    context, names = offered("", f" {name} ,")
    assert names - set(NEWEST.split(",")) == {"ECDHE-RSA-AES128-GCM-SHA256"}
    assert context.minimum_version is context.maximum_version is ssl.TLSVersion.TLSv1_2


def test_a_list_with_suites_of_tls_1_3_only_excludes_tls_1_2() -> None:
    assert suites.ciphers_problem(NEWEST) == ""
    context, _ = offered("", NEWEST)
    assert context.minimum_version is context.maximum_version is ssl.TLSVersion.TLSv1_3


def test_suites_of_both_versions() -> None:
    context, names = offered("TLSv1.3,TLSv1.2", f"{NEWEST},ECDHE-ECDSA-AES256-GCM-SHA384")
    assert names == {*NEWEST.split(","), "ECDHE-ECDSA-AES256-GCM-SHA384"}
    assert (context.minimum_version, context.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


def test_without_lists_the_minimum_is_tls_1_2() -> None:
    context, names = offered("", "")
    assert names == {entry["name"] for entry in ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).get_ciphers()}
    assert (context.minimum_version, context.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)


@pytest.mark.parametrize(
    ("text", "version"), [("TLSv1.2", ssl.TLSVersion.TLSv1_2), ("TLSv1.3", ssl.TLSVersion.TLSv1_3)]
)
def test_protocols_narrow(text: str, version: ssl.TLSVersion) -> None:
    context, _ = offered(text, "")
    assert context.minimum_version is context.maximum_version is version


@pytest.mark.parametrize("text", ["TLSv1.1", "TLSv1.2,SSLv3", "tlsv1.2"])
def test_other_protocols_are_refused(text: str) -> None:
    assert suites.protocols_problem(text) == "a list of TLSv1.2, TLSv1.3"


def test_unknown_and_weak_suites_are_refused_with_the_known_ones() -> None:
    for name in ("TLS_RSA_WITH_RC4_128_MD5", "NULL-SHA"):
        problem = suites.ciphers_problem(f"ECDHE-RSA-AES128-GCM-SHA256,{name}")
        assert problem.startswith(f"no {name}, but cipher suites of ")
        assert "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256" in problem
        assert "ECDHE-RSA-AES128-GCM-SHA256" not in problem


def test_a_part_of_the_suites_of_tls_1_3_is_refused() -> None:
    assert suites.ciphers_problem("TLS_AES_256_GCM_SHA384").startswith(
        "all cipher suites of TLS 1.3 or none: TLS_AES_128"
    )


@pytest.mark.parametrize(
    ("protocols", "ciphers", "fits"),
    [
        ("TLSv1.3", "ECDHE-RSA-AES128-GCM-SHA256", False),
        ("TLSv1.2", NEWEST, False),
        ("TLSv1.2", f"{NEWEST},ECDHE-RSA-AES128-GCM-SHA256", True),
        ("TLSv1.3", NEWEST, True),
        ("", NEWEST, True),
        ("TLSv1.2", "", True),
    ],
)
def test_protocols_and_suites_have_to_leave_one(protocols: str, ciphers: str, *, fits: bool) -> None:
    assert (suites.joint_problem(protocols, ciphers) == "") is fits
