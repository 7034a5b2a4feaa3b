"""Units of a queue as columns of numpy. Source and layout: queue_unit.py."""

from typing import Final

import numpy as np

UNIT_TYPE: Final = np.dtype([("phy", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
"""Log offset (in the tier the position in the queue's stream), size and tags code."""
