"""Support code for the tests with official partners: processes, servers, the partners' drivers."""

from __future__ import annotations

import pytest

#: Figures that a run prints at its end, whether it passed or not.
REMARKS = pytest.StashKey[list[str]]()
