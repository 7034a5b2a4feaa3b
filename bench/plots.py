"""The report's plots: bars, and lines over a logarithmic axis, written as SVG without a library."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

WIDTH: Final = 760
_COLOURS: Final = ("#1f6fb4", "#d1622b", "#3a9a4c", "#8a56a8", "#b08a1e")
_ROW: Final = 24
_HEIGHT: Final = 260


class Bar(NamedTuple):
    """A row of a bar chart. ``mark`` is the value at which a line crosses it, if any."""

    label: str
    value: float
    mark: float | None = None


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ccc") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _picture(height: float, title: str, parts: Iterator[str]) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    name = f'<text x="10" y="18" font-size="14" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, f'<rect {size} fill="white"/>', name, *parts, "</svg>\n"])


def bars(title: str, rows: Sequence[Bar], unit: str, base: float | None = None, *, least: bool = False) -> str:
    """Horizontal bars. A line across all of them marks the value ``base``.

    A bar below its mark has another colour; with ``least``, a bar above its mark.
    """
    left, right, top = 190, 70, 34
    most = max([row.value for row in rows] + [row.mark or 0 for row in rows] + [base or 0], default=1) or 1
    height = top + _ROW * len(rows) + 16

    def place(value: float) -> float:
        return left + (WIDTH - left - right) * value / most

    def parts() -> Iterator[str]:
        if base is not None:
            yield _line(place(base), top - 4, place(base), height - 12, "#888")
        for at, row in enumerate(rows):
            y = top + _ROW * at
            good = row.mark is None or (row.value <= row.mark if least else row.value >= row.mark)
            colour = _COLOURS[0 if good else 1]
            yield _text(left - 8, y + 15, row.label, "end")
            length = place(row.value) - left
            yield f'<rect x="{left}" y="{y + 4}" width="{length:.1f}" height="{_ROW - 9}" fill="{colour}"/>'
            if row.mark is not None:
                yield _line(place(row.mark), y + 1, place(row.mark), y + _ROW - 2, "#000")
            yield _text(place(max(row.value, row.mark or 0)) + 6, y + 15, f"{row.value:.2f}{unit}")

    return _picture(height, title, parts())


def lines(title: str, x_unit: str, y_unit: str, rows: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Values over a logarithmic axis, with a line for each row."""
    left, right, top, bottom = 60, 20, 34, 40
    below = _HEIGHT - bottom
    xs = sorted({x for points in rows.values() for x, _ in points})
    logs = [math.log10(x) for x in xs]
    span = (logs[-1] - logs[0]) or 1
    most = max(y for points in rows.values() for _, y in points) * 1.1 or 1
    step = 10 ** math.floor(math.log10(most))
    step = next(part for part in (step / 5, step / 2, step, 2 * step) if most / part <= 6)
    height = _HEIGHT + 8 + 18 * len(rows)

    def across(x: float) -> float:
        return left + (WIDTH - left - right) * (math.log10(x) - logs[0]) / span

    def up(y: float) -> float:
        return below - (below - top) * y / most

    def parts() -> Iterator[str]:
        for number in range(int(most / step) + 1):
            yield _line(left, up(number * step), WIDTH - right, up(number * step))
            yield _text(left - 6, up(number * step) + 4, f"{number * step:g}", "end")
        for x in xs:
            yield _text(across(x), below + 16, f"{x:,.0f}" if x >= 10 else f"{x:.2g}", "middle")
        yield _text(WIDTH - right, below + 34, x_unit, "end")
        yield _text(left, below + 34, y_unit)
        for at, (name, points) in enumerate(rows.items()):
            colour = _COLOURS[at % len(_COLOURS)]
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            for x, y in points:
                yield f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>'
            y_of_name = _HEIGHT + 4 + 18 * at
            yield f'<rect x="{left}" y="{y_of_name}" width="14" height="4" fill="{colour}"/>'
            yield _text(left + 20, y_of_name + 7, name)

    return _picture(height, title, parts())


class Plots:
    """Writes plots into a directory and returns the lines of the page that show them."""

    def __init__(self, directory: Path) -> None:
        """``directory`` is in the same folder as the page."""
        self._directory = directory

    def show(self, name: str, alt: str, picture: Callable[[], str]) -> list[str]:
        """Write a plot to its file; returns the lines that show it."""
        self._directory.mkdir(exist_ok=True)
        (self._directory / f"{name}.svg").write_text(picture(), encoding="utf-8")
        return [f"![{alt}]({self._directory.name}/{name}.svg)", ""]
