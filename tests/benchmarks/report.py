"""The one form of every benchmark's figures: a table to read, a list of JSON objects to keep, a chart. Never judges.

Run as a script it shows the figures of several JSON files together, and draws them: what `make bench` ends with.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

COLUMNS = ("figure", "ours", "peer", "ratio", "aim", "unit", "rounds")


@dataclass(frozen=True)
class Figure:
    """One comparison: what each side measured, a number a round. Without a peer it is a figure alone."""

    name: str
    ours: list[float]
    peer: list[float]
    aim: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        return median(self.ours) / median(self.peer) if self.peer else None

    def _rounds(self) -> list[tuple[float, ...]]:
        return list(zip(self.ours, self.peer, strict=True)) if self.peer else [(number,) for number in self.ours]

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": self.name,
            "ours": round(median(self.ours), 3),
            "peer": round(median(self.peer), 3) if self.peer else None,
            "ratio": round(self.ratio, 3) if self.ratio is not None else None,
            "aim": self.aim,
            "unit": self.unit,
            "rounds": [[round(number, 3) for number in numbers] for numbers in self._rounds()],
        }


def report(figures: list[Figure], json_file: Path | None) -> None:
    """Print the figures' medians and ratios, and write them to `json_file` where one is given."""
    rows = [figure.to_json() for figure in figures]
    show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print figures in their JSON form."""
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*(str(row[column] if row[column] is not None else "") for column in COLUMNS))
    Console().print(table)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the ratios of figures in their JSON form, a bar from 1 and an aim each; `path` ends with .png or .svg.

    Figures without a ratio are left out.
    """
    from matplotlib.figure import Figure as Chart

    drawn = [row for row in rows if row["ratio"] is not None]
    chart = Chart(figsize=(11, 1.2 + 0.32 * len(drawn)), layout="constrained")
    axes = chart.subplots()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    bars = axes.barh(range(len(drawn)), [row["ratio"] - 1 for row in drawn], left=1, color="#4c78a8", label="measured")
    axes.bar_label(bars, [f"{row['ratio']:.3g}" for row in drawn], padding=4)
    aims = {place: row["aim"] for place, row in enumerate(drawn) if row["aim"] is not None}
    axes.scatter(aims.values(), aims.keys(), marker="|", s=240, color="#e45756", zorder=3, label="aim")
    axes.axvline(1, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(drawn)), [f"{row['figure']} ({row['unit']})" for row in drawn])
    axes.invert_yaxis()
    axes.set_xlabel("ours / peer, medians")
    axes.legend()
    chart.savefig(path)


def main(
    files: Annotated[list[Path], typer.Argument(help="What benchmarks wrote with --json.")],
    chart: Annotated[Path | None, typer.Option(help="Where to draw, as .png or .svg.")] = None,
) -> None:
    """Show and draw the figures of several benchmarks."""
    rows = [row for file in files for row in json.loads(file.read_text())]
    show(rows)
    if chart is not None:
        draw(rows, chart)


if __name__ == "__main__":
    typer.run(main)
