"""Topics and properties of records of one layout, the fast path: a matrix of bytes with a row for each record.

See text_layout for when this applies. A property is then a range of columns of the matrix, and only the first record's
text is parsed.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from trimq.pipeline.store.gather import matrix_as_text
from trimq.pipeline.store.heads import Array, Heads, values_at
from trimq.pipeline.store.text_layout import layout_of

_LEAST: Final = 16
"""With fewer records the test of the layout costs more than it saves."""
_LONGEST: Final = 4096
_SPACE: Final = 32
WORDS: Final = pa.list_(pa.field("element", pa.string()))


@dataclass
class UniformTexts:
    """``texts``: each record's bytes behind its body. ``values``: the columns of each property's value in them.

    ``values`` is in the order of each name's last pair, which is the one that counts.
    """

    texts: Array
    topic: slice
    values: dict[str, slice]
    is_ascii: bool

    def topics(self) -> pa.StringArray:
        """The topic of each record."""
        topics = self.texts[:, self.topic]
        if (topics == topics[0]).all():
            return pa.repeat(pa.scalar(topics[0].tobytes().decode("utf-8", "replace"), pa.string()), len(topics))
        return matrix_as_text(topics, is_ascii=self.is_ascii)

    def column(self, name: str) -> pa.StringArray:
        """The value of a property for each record, null if it has none."""
        place = self.values.get(name)
        return (
            pa.nulls(len(self.texts), pa.string())
            if place is None
            else matrix_as_text(self.texts[:, place], is_ascii=self.is_ascii)
        )

    def has_words(self, name: str) -> bool:
        """Whether some record's value of this property contains a space: it may not be exactly one word."""
        place = self.values.get(name)
        return place is not None and bool((self.texts[:, place] == _SPACE).any())

    def word_lists(self, name: str) -> pa.ListArray:
        """A list with the value for each record, empty if it has none. Not for a property that ``has_words``."""
        count = len(self.texts)
        place = self.values.get(name)
        if place is None:
            words, offsets = pa.array([], pa.string()), np.zeros(count + 1, dtype=np.int32)
        else:
            words, offsets = (
                matrix_as_text(self.texts[:, place], is_ascii=self.is_ascii),
                np.arange(count + 1, dtype=np.int32),
            )
        return pa.ListArray.from_arrays(pa.array(offsets), words, type=WORDS)

    def maps(self) -> pa.MapArray:
        """All properties of each record."""
        count = len(self.texts)
        places = list(self.values.values())
        if not places:
            nothing = pa.array([], pa.string())
            return pa.MapArray.from_arrays(pa.array(np.zeros(count + 1, dtype=np.int32)), nothing, nothing)
        values = np.concatenate([self.texts[:, place] for place in places], axis=1)
        widths = np.array([place.stop - place.start for place in places])
        names = [name.encode() for name in self.values]
        all_names = np.frombuffer(b"".join(names) * count, dtype=np.uint8).reshape(count, -1)
        return pa.MapArray.from_arrays(
            pa.array(np.arange(0, len(places) * count + 1, len(places), dtype=np.int32)),
            matrix_as_text(all_names, np.array([len(name) for name in names])),
            matrix_as_text(values, widths, is_ascii=self.is_ascii),
        )


def uniform_texts(view: memoryview, heads: Heads) -> UniformTexts | None:
    """The texts of records of one layout; None if the layouts differ, or the fast path is not worth it."""
    if len(heads) < _LEAST:
        return None
    topic_at, topic_end, properties_at, end = (
        values - heads.body_end
        for values in (heads.topic_at, heads.topic_end, heads.properties_at, heads.properties_end)
    )
    length = int(end[0])
    if length > _LONGEST or any((values != values[0]).any() for values in (topic_at, topic_end, end)):
        return None
    texts = values_at(view, heads.body_end, np.dtype(f"V{length}")).view(np.uint8).reshape(len(heads), length)
    topic, begin = slice(int(topic_at[0]), int(topic_end[0])), int(properties_at[0])
    common = layout_of(texts, begin)
    if common is None:
        return None
    return UniformTexts(
        texts, topic, common.values, common.highest[topic].isascii() and common.highest[begin:].isascii()
    )
