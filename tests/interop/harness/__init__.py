"""What the tests with official partners stand on: processes, servers, the partners' drivers."""

from __future__ import annotations

import pytest

#: Figures that a run tells at its end, whether it passed or not.
REMARKS = pytest.StashKey[list[str]]()
