"""Protocol versions and cipher suites by the names of configuration files: Java's (IANA) and OpenSSL's.

TLS 1.2 is the minimum, and OpenSSL's own selection of suites the most: a configuration can narrow both.
"""

import functools
import re
import ssl
from typing import Final

_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_SIZES: Final = re.compile(r"(AES|CAMELLIA|ARIA)(128|256)")


def names(text: str) -> list[str]:
    """The names in a list separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def protocols_problem(text: str) -> str:
    """What was expected instead of the value of ``tls.protocols``; empty if it is valid."""
    return "" if all(name in _VERSIONS for name in names(text)) else "a list of TLSv1.2, TLSv1.3"


def ciphers_problem(text: str) -> str:
    """What was expected instead of the value of ``tls.ciphers``; empty if it is valid."""
    known = _suites()
    unknown = [name for name in names(text) if name not in known]
    if unknown:
        return f"no {unknown[0]}, but cipher suites of {', '.join(sorted({standard_name(name) for name in known}))}"
    newest = {known[name] for name in names(text) if is_newest(known[name])}
    every = {name for name in known.values() if is_newest(name)}
    if newest and newest != every:
        return f"all cipher suites of TLS 1.3 or none: {', '.join(sorted(every))}"  # see narrow
    return ""


def joint_problem(protocols: str, ciphers: str) -> str:
    """What was expected of ``tls.ciphers`` beside these protocols; empty if one suite at least is left."""
    if not names(protocols) or not names(ciphers):
        return ""
    newest = {is_newest(name) for name in names(ciphers)}
    versions = names(protocols)
    fits = (True in newest and "TLSv1.3" in versions) or (False in newest and "TLSv1.2" in versions)
    return "" if fits else f"cipher suites of tls.protocols={protocols}"


def narrow(context: ssl.SSLContext, protocols: str, ciphers: str) -> None:
    """Limit ``context`` to at least TLS 1.2, and to these lists if they are not empty. Both must be valid.

    Python cannot choose among the suites of TLS 1.3. A list without any of them excludes TLS 1.3.
    """
    versions = [_VERSIONS[name] for name in names(protocols)] or list(_VERSIONS.values())
    known = _suites()
    chosen = [known[name] for name in names(ciphers)]
    older = [name for name in chosen if not is_newest(name)]
    if older:
        context.set_ciphers(":".join(older))
    if chosen and not older:
        versions = [ssl.TLSVersion.TLSv1_3]
    elif chosen and len(older) == len(chosen):
        versions = [ssl.TLSVersion.TLSv1_2]
    context.minimum_version, context.maximum_version = min(versions), max(versions)


def is_newest(suite: str) -> bool:
    """Whether a suite is one of TLS 1.3: these name no key exchange."""
    return suite.startswith("TLS_") and "_WITH_" not in suite


def standard_name(suite: str) -> str:
    """The IANA name, which Java uses, of a suite that OpenSSL's selection contains.

    >>> standard_name("ECDHE-RSA-AES128-GCM-SHA256")
    'TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256'
    """
    if suite.startswith("TLS_"):
        return suite
    parts = suite.split("-")
    at = next(n for n, part in enumerate(parts) if part.startswith(("AES", "CAMELLIA", "ARIA", "CHACHA20")))
    exchange, cipher = parts[:at] or ["RSA"], parts[at:]
    if cipher == ["CHACHA20", "POLY1305"]:
        cipher.append("SHA256")
    elif len(cipher) == 2 and cipher[1].startswith("SHA"):
        cipher.insert(1, "CBC")
    elif cipher[-1] == "CCM8":
        cipher[-1:] = ["CCM", "8"]
    sized = _SIZES.sub(r"\1_\2", "_".join(cipher))
    return f"TLS_{'_'.join(exchange)}_WITH_{sized}"


@functools.cache
def _suites() -> dict[str, str]:
    """OpenSSL's name of each suite that a context of this Python offers, by both names.

    Not those of SRP, which need a file of passwords.
    """
    entries = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).get_ciphers()
    offered = [entry["name"] for entry in entries if not entry["name"].startswith("SRP-")]
    return {standard_name(name): name for name in offered} | {name: name for name in offered}
