"""Whether this machine can build the native extension, as native/make-wheel sees it."""

import os
import subprocess

import pytest

from tests.interop.harness import partners
from tests.packaging.checkout import ROOT


def demanded() -> bool:
    """Rust is there, so that the extension has to be. In CI a Rust that is missing is a failure."""
    if os.environ.get("NATIVE") == "off":
        return False
    look = subprocess.run([ROOT / "native/make-wheel", "--look"], capture_output=True, text=True, check=False)
    if look.returncode and partners.in_ci():
        pytest.fail(look.stderr)
    return look.returncode == 0


def need() -> None:
    """Skips the test where Rust is missing."""
    if not demanded():
        pytest.skip("needs a Rust that is new enough for native/")
