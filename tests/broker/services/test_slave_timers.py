"""What a slave stores of its master's timers, and from where on it needs the log for them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.store.builders import record_of
from trimq.broker.services.slave_timers import SlaveTimers
from trimq.protocol.timer_handover import NOT_KNOWN, NOTHING_PENDING, TimerHandover
from trimq.protocol.timer_layout import TimerCheckpoint
from trimq.protocol.topic_rules import TIMER_TOPIC
