"""Whether this machine can build the native extension, according to native/make-wheel."""

import os
import subprocess

import pytest

from tests.interop.harness import partners
from tests.packaging.checkout import ROOT


def demanded() -> bool:
    """Whether Rust is installed, so that the extension must be built. In CI a missing Rust is a failure."""
    if os.environ.get("NATIVE") == "off":
        return False
    look = subprocess.run([ROOT / "native/make-wheel", "--look"], capture_output=True, text=True, check=False)
    if look.returncode and partners.in_ci():
        pytest.fail(look.stderr)
    return look.returncode == 0


def need() -> None:
    """Skip the test if Rust is missing."""
    if not demanded():
        pytest.skip("needs a Rust toolchain that is recent enough for native/")
