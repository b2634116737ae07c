"""The one form of every benchmark's figures: a table to read, a list of JSON objects to keep. Never judges."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


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
    table = Table("figure", "ours", "peer", "ratio", "aim", "unit", "rounds")
    for figure in figures:
        row = figure.to_json()
        table.add_row(
            *(
                str(row[key] if row[key] is not None else "")
                for key in ("figure", "ours", "peer", "ratio", "aim", "unit", "rounds")
            )
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([figure.to_json() for figure in figures], indent=2) + "\n")
