"""A report as one HTML file: tables, and plots where matplotlib is installed."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}img{max-width:100%}"
)
_LABEL = 32
"""Characters of a label in a plot; the tables show it in full."""


class Page:
    """Collects tables and plots; ``write`` makes the file."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add a table of rows that have the same keys."""
        self._parts.append(f"<h2>{html.escape(title)}</h2>")
        if not rows:
            self._parts.append("<p>none</p>")
            return
        head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
        lines = [f"<tr>{''.join(f'<td>{html.escape(str(value))}</td>' for value in row.values())}</tr>" for row in rows]
        self._parts.append(f"<table><tr>{head}</tr>{''.join(lines)}</table>")

    def line(self, title: str, xs: Sequence[Any], ys: Sequence[float]) -> None:
        """Add a line plot over time."""
        self._plot(title, lambda axes: axes.plot(list(xs), list(ys), marker="o"))

    def bars(self, title: str, labels: Sequence[str], values: Sequence[float], *, upright: bool = False) -> None:
        """Add a plot with a bar for each label."""
        short = [label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…" for label in labels]

        def draw(axes: Any) -> None:
            if upright:
                axes.bar(list(labels), list(values))
                axes.tick_params(axis="x", rotation=60)
            else:
                axes.barh(range(len(short)), list(values)[::-1], tick_label=short[::-1])

        self._plot(title, draw, height=4 if upright else max(2.0, 1 + 0.3 * len(labels)))

    def _plot(self, title: str, draw: Any, *, height: float = 4) -> None:
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - the plots extra
        except ImportError:
            self.text(f"{title}: no plot, matplotlib is not installed (pip install 'trimq[plots]')")
            return
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        draw(axes)
        image = io.BytesIO()
        figure.savefig(image, format="png")
        data = base64.b64encode(image.getvalue()).decode()
        self._parts.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">')

    def write(self, path: str | Path) -> None:
        """Write the page to a file."""
        title = html.escape(self._title)
        head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        Path(path).write_text(head + "\n".join(self._parts), encoding="utf-8")
