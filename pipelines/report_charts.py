"""Charts of a report: figures as SVG that takes its colours from the page (light or dark) and is read by name and
description where nobody sees it.

Matplotlib draws with colours that stand for the page's; `_as_svg` puts the page's CSS variables in their place.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipelines.report_figures import Figures
from pipelines.report_pages import clock, short

# Inches: what is as wide as the page, as half of it, and what a phone shows.
FULL, HALF, NARROW = 10.2, 5.0, 4.3
_SHADES = {
    "#010101": "var(--ink)",
    "#010102": "var(--muted)",
    "#010103": "var(--line)",
    "#010104": "var(--one)",
    "#010105": "var(--two)",
    "#010106": "var(--three)",
    "#010107": "var(--four)",
}
INK, MUTED, LINE, ONE, TWO, THREE, FOUR = _SHADES
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}
# Cells of a time line that are drawn.
_CELLS = {FULL: 150, NARROW: 60}
_MOST_REPLICAS = 64
_LEVELS = 5


def course(told: Figures, width: float) -> Markup:
    """Throughput, rows in flight and the replicas over time, one below the other."""
    cell_s, sums = _coarse(told, _CELLS[width])
    edges = np.arange(len(sums["tokens"]) + 1) * cell_s
    drawn = told.replicas[:_MOST_REPLICAS]
    heights = [1.7, 1.7, 0.35 + 0.2 * max(2, min(len(drawn), 24))]
    name = f"course-{'full' if width == FULL else 'narrow'}"
    about = (
        f"Three charts over {clock(edges[-1])} from {_time(told.began)} UTC. Answer tokens a second: at most "
        f"{short(sums['tokens'].max())}. Rows in the engines: at most {short((sums['running']).max())} running and "
        f"{short(sums['waiting'].max())} waiting. {len(told.replicas)} replicas, busy on average for "
        f"{clock(sum(one.busy_s for one in told.replicas) / len(told.replicas))}."
    )
    with _drawing(name, width, heights, "The run over time", about, bottom=0.5) as (axes, done):
        rate, flight, engines = axes
        rate.stairs(sums["tokens"], edges, fill=True, color=ONE)
        rate.set_title("Answer tokens a second")
        flight.stairs(sums["running"], edges, fill=True, color=ONE, label="running")
        both = sums["running"] + sums["waiting"]
        flight.stairs(both, edges, baseline=sums["running"], fill=True, color=TWO, label="waiting")
        flight.set_title("Rows in engines")
        flight.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, handlelength=0.9, borderaxespad=0.1)
        for place in (rate, flight):
            place.grid(axis="y")
            place.set_ylim(0, max(1e-9, place.dataLim.y1) * 1.05)
            place.yaxis.set_major_locator(MaxNLocator(4))
            place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            place.set_xlim(0, edges[-1])
            place.set_xticks([])
        _engines(engines, drawn, edges, told, _CELLS[width])
        engines.xaxis.set_major_locator(MaxNLocator(8 if width == FULL else 4, steps=[1, 1.5, 3, 6, 10]))
        engines.xaxis.set_major_formatter(FuncFormatter(lambda value, _: clock(value)))
        engines.set_xlabel(f"since {_time(told.began)} UTC")
        engines.set_xlim(0, edges[-1])
    return done[0]


def _engines(axes: Any, drawn: Sequence[Any], edges: Any, told: Figures, num_cells: int) -> None:
    """A row each, in fuller colour the more rows are in it."""
    peak = max((one.in_flight.max() for one in drawn), default=1.0) or 1.0
    for place, one in enumerate(drawn):
        _, sums = _coarse(told, num_cells, {"in_flight": one.in_flight})
        levels = np.ceil(np.minimum(1.0, sums["in_flight"] / peak) * _LEVELS).astype(int)
        cuts = np.flatnonzero(np.diff(levels)) + 1
        spans: dict[int, list[tuple[float, float]]] = {}
        for begin, end in pairwise([0, *cuts, len(levels)]):
            spans.setdefault(levels[begin], []).append((edges[begin], edges[end] - edges[begin]))
        spans.pop(0, None)
        for level, those in spans.items():
            axes.broken_barh(those, (place - 0.4, 0.8), color=ONE, alpha=level / _LEVELS, linewidth=0)
    axes.set_title(f"Replicas: fuller with more rows, {short(peak)} at most")
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_yticks(range(len(drawn)) if len(drawn) <= 24 else [0, len(drawn) - 1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: str(int(value) + 1)))


def _coarse(told: Figures, most: int, lines: Mapping[str, Any] | None = None) -> tuple[float, dict[str, Any]]:
    """Time lines of few enough cells: means of those that fall together; and a cell's seconds."""
    lines = lines or {"tokens": told.tokens_per_s, "running": told.running, "waiting": told.waiting}
    step = -(-len(told.running) // most)
    made = {}
    for name, line in lines.items():
        padded = np.pad(line, (0, -len(line) % step))
        made[name] = padded.reshape(-1, step).mean(axis=1)
    return told.cell_s * step, made


def histogram(name: str, title: str, labels: Sequence[str], counts: Sequence[int], about: str) -> Markup:
    """Bars side by side: how many rows lie in each of some ranges; `labels`: where each begins, and the last ends."""
    with _drawing(name, HALF, [1.5], title, about) as (axes, done):
        axes.bar(range(len(counts)), counts, width=0.88, color=ONE)
        axes.set_title(title)
        # The edges between the bars are labelled.
        step = -(-len(labels) // 7)
        axes.set_xticks([place - 0.5 for place in range(0, len(labels), step)], list(labels)[::step])
        axes.grid(axis="y")
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    return done[0]


def savings(rows: Mapping[str, Mapping[str, int]], about: str) -> Markup:
    """A bar a kind of tokens, in parts: computed, and saved in which way."""
    shades = {"computed": ONE, "cached": TWO, "deduplicated": THREE, "carried": FOUR}
    with _drawing("savings", HALF, [0.8], "Where the tokens came from", about, 0.75, 0.6) as (axes, done):
        for place, (_, parts) in enumerate(rows.items()):
            whole, begin = sum(parts.values()) or 1, 0.0
            for part, number in parts.items():
                share = number / whole
                axes.barh(place, share, left=begin, height=0.55, color=shades[part], label=part if not place else None)
                begin += share
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_title("Where the tokens came from")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.figure.legend(loc="lower left", ncols=4, handlelength=0.9, handleheight=0.9, columnspacing=1.2)
    return done[0]


def reasons(counts: Mapping[str, int], about: str) -> Markup:
    """A bar a reason, the most frequent one first."""
    with _drawing("reasons", HALF, [0.3 * len(counts)], "Errors by reason", about, 1.9, 0.1) as (axes, done):
        bars = axes.barh(range(len(counts)), list(counts.values()), height=0.62, color=TWO)
        axes.bar_label(bars, [f"{number:,}" for number in counts.values()], padding=4, color=INK)
        axes.set_yticks(range(len(counts)), [name if len(name) < 26 else f"{name[:25]}…" for name in counts])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title("Errors by reason")
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    return done[0]


def trend(runs: Sequence[Mapping[str, Any]], width: float) -> Markup:
    """Rows, and seconds, of the last runs; the oldest first."""
    name = f"trend-{'full' if width == FULL else 'narrow'}"
    newest = runs[-1]
    about = (
        f"{len(runs)} runs, the oldest first. Rows of the newest: {newest['answered']:,} answered, "
        f"{newest['carried']:,} carried over, {newest['errors']:,} failed. The table below has all of them."
    )
    with _drawing(name, width, [1.7, 1.0], "The last runs", about) as (axes, done):
        rows, seconds = axes
        at = np.arange(len(runs))
        below = np.zeros(len(runs))
        parts = {"answered": ("answered", ONE), "carried": ("carried over", FOUR), "errors": ("failed", TWO)}
        for part, (label, shade) in parts.items():
            numbers = np.array([run[part] for run in runs], float)
            rows.bar(at, numbers, bottom=below, width=0.7, color=shade, label=label)
            below += numbers
        rows.set_title("Rows")
        rows.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, handlelength=0.9, borderaxespad=0.1)
        rows.set_xticks([])
        seconds.bar(at, [run["total_s"] for run in runs], width=0.7, color=THREE)
        seconds.set_title("Time in all")
        seconds.yaxis.set_major_formatter(FuncFormatter(lambda value, _: clock(value)))
        rows.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        for place in (rows, seconds):
            place.set_xlim(-0.6, len(runs) - 0.4)
            place.grid(axis="y")
            place.yaxis.set_major_locator(MaxNLocator(3))
        step = -(-len(runs) // (15 if width == FULL else 6))
        seconds.set_xticks(at[::-step][::-1], [runs[int(place)]["day"] for place in at[::-step][::-1]])
    return done[0]


@contextmanager
def _drawing(
    name: str, width: float, heights: Sequence[float], title: str, about: str, left: float = 0.5, bottom: float = 0.3
) -> Iterator[tuple[Any, list[Markup]]]:
    """Axes to draw on, of such heights (inches), one above the other; the finished SVG is in the list when the block
    ends. `left` and `bottom`: inches for labels; matplotlib's own layouts take most of the time of a chart."""
    done: list[Markup] = []
    between = 0.3
    height = sum(heights) + between * len(heights) + bottom
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        axes = []
        top = height
        for one in heights:
            top -= between + one
            box = (left / width, top / height, 1 - (left + 0.12) / width, one / height)
            axes.append(figure.add_axes(box))
        yield (axes if len(axes) > 1 else axes[0]), done
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    done.append(_as_svg(drawn.getvalue(), name, title, about))


def _as_svg(drawn: str, name: str, title: str, about: str) -> Markup:
    """An `svg` element for a page that has others beside it."""
    drawn = drawn[drawn.index("<svg ") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", drawn)
    for shade, variable in _SHADES.items():
        drawn = drawn.replace(shade, variable)
    drawn = re.sub(r"\s*\n\s*", " ", drawn)
    drawn = re.sub(r"(\d\.\d\d)\d+", r"\1", drawn)
    width = float(re.search(r'width="([\d.]+)pt"', drawn)[1])  # type: ignore[index]  # matplotlib writes it
    head, rest = drawn.split(">", 1)
    head = re.sub(r' (width|height)="[\d.]+pt"', "", head)
    told = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(about)}</desc>'
    label = f'role="img" class="chart" aria-labelledby="{name}-title {name}-desc"'
    return Markup(f'{head} {label} style="max-width: {width * 4 / 3:.0f}px">{told}{rest}')  # noqa: S704 - all escaped


def _time(began: float | None) -> str:
    return datetime.fromtimestamp(began or 0.0, UTC).strftime("%Y-%m-%d %H:%M:%S")
