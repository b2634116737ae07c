"""Report: a published run as pages that load nothing: its figures and charts, and, where asked for, rows to read.

The figures are those of the manifest wherever it has them; the tables add what they alone tell, and are refused where
they don't add up to it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from pipelines import report_charts as charts
from pipelines.costs import bill_of
from pipelines.published import PublishedRun, find_run
from pipelines.report_figures import Distribution, Figures, figures_of, first_errors
from pipelines.report_pages import clock, number, render, short
from pipelines.report_rows import Wanted, choose
from pipelines.storage import Folder, explain
from schemas.failures import StorageFailed, UsageError

NAME = "report.html"
# Runs that a trend is of.
MAX_RUNS = 30
_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_TIMES = {
    "queue_ms": "Waiting for a place in the engine",
    "first_token_ms": "Until the first token",
    "total_ms": "Until the last token",
}
_TOKENS = {"prompt_tokens": "Prompt", "completion_tokens": "Answer"}
_MAX_INPUTS = 100
# Characters of a failed line that are shown.
_MAX_RAW = 400


@dataclass(frozen=True, slots=True)
class Written:
    """Which run was shown, and where."""

    run_id: str
    paths: tuple[str, ...]
    num_rows: int | None = None


def write_report(source: str, run_id: str | None, to: str | None = None, wanted: Wanted | None = None) -> Written:
    """Write the page of a run of the folder `source` (None: its current one) to the file `to` (None: report.html in the
    run's folder), and, where rows are wanted, theirs beside it. Raises UsageError for what the user must change."""
    output = Folder.at(source)
    run = find_run(output, run_id, "--output")
    folder, name = _target(output, run, to)
    rows_name = None if wanted is None else f"{name.removesuffix('.html')}-rows.html"
    pages, num_rows = {name: report_page(output, run, rows_name)}, None
    if wanted is not None and rows_name is not None:
        pages[rows_name], num_rows = rows_page(run, wanted, name)
    try:
        for page, text in pages.items():
            folder.write(text.encode(errors="backslashreplace"), page)
    except StorageFailed as error:
        raise UsageError(
            f"{folder.show()}: can't be written to ({explain(error)}). Give --to a file in a folder that can"
        ) from error
    return Written(run.id, tuple(folder.show(page) for page in pages), num_rows)


def _target(output: Folder, run: PublishedRun, to: str | None) -> tuple[Folder, str]:
    if to is None:
        return run.folder, NAME
    target = PurePosixPath(to)
    if target.suffix != ".html":
        raise UsageError(f"--to {to}: expected a file whose name ends with .html")
    folder = Folder.at(to.rpartition("/")[0] or ("/" if to.startswith("/") else "."))
    # `score` refuses a folder that holds anything but runs.
    if f"{folder.uri.rstrip('/')}/".startswith(f"{output.uri.rstrip('/')}/"):
        raise UsageError(
            f"--to {to}: lies within {output.show()}, which is for runs alone. Give a file outside of it, or leave "
            "--to out for one in the run's folder"
        )
    return folder, target.name


def rows_page(run: PublishedRun, wanted: Wanted, report_name: str) -> tuple[str, int]:
    """The page that shows rows of a run one by one, and how many it holds."""
    chosen = choose(run, wanted)
    return render("rows.html", run=run, chosen=chosen, wanted=wanted, report=report_name), len(chosen.rows)


def report_page(output: Folder, run: PublishedRun, rows_name: str | None = None) -> str:
    """The page of a run of a folder; `rows_name`: of the file that shows its rows, beside it."""
    return render("report.html", **_told(output, run), rows_page=rows_name)


def _told(output: Folder, run: PublishedRun) -> dict[str, Any]:
    """What the page's template asks for."""
    manifest, figures = run.manifest, figures_of(run)
    seconds = manifest["timings_s"]["infer"]
    return {
        "run": run,
        "manifest": manifest,
        "figures": figures,
        "tokens_per_s": manifest["computed"]["completion_tokens"] / seconds if seconds else 0.0,
        "courses": _courses(figures),
        "quantiles": _QUANTILES,
        "times": [(label, figures.times[name]) for name, label in _TIMES.items()],
        "tokens": [(label, figures.tokens[name]) for name, label in _TOKENS.items()],
        "histograms": _histograms(figures),
        "savings_chart": charts.savings(_savings(figures), _about_savings(figures)) if figures.num_rows else None,
        "errors": _errors(run),
        "reasons_chart": _reasons(manifest["errors_by_reason"]),
        "bill": bill_of(manifest),
        "inputs": [(file["name"], f"{file['size_bytes']:,} bytes") for file in manifest["inputs"][:_MAX_INPUTS]],
        "settings": flat(manifest["settings"]),
        "versions": flat(manifest["versions"]),
        "kinds": _kinds(figures),
        "changes": _changes(manifest),
        "against": (manifest.get("changes") or {}).get("against", "the run before"),
        **_trend(output, run),
    }


def _courses(figures: Figures) -> list[tuple[str, Any]]:
    if figures.began is None:
        return []
    return [("wide", charts.course(figures, charts.FULL)), ("narrow", charts.course(figures, charts.NARROW))]


# --- distributions --------------------------------------------------------------------------------------------------


def _histograms(figures: Figures) -> list[Any]:
    drawn = []
    for name, label in _TIMES.items():
        if (values := figures.times[name]).number:
            drawn.append(_histogram(name, f"{label}: rows", values, _steps(values, (1, 2, 5)), _milliseconds, "ms"))
    for name, label in _TOKENS.items():
        if (values := figures.tokens[name]).number:
            title = f"{label}s by tokens: rows"
            drawn.append(_histogram(name, title, values, _steps(values, (1, 2, 4, 8)), short, "tokens"))
    return drawn


def _steps(values: Distribution, steps: tuple[int, ...]) -> list[float]:
    """Edges around all values: from 0 where it is one, else 1, 2, 5, 10, … or the powers of two."""
    edges, factor = [0.0], 1
    base = 16 if 8 in steps else 10
    while edges[-1] <= values.most:
        edges += [float(step * factor) for step in steps]
        factor *= base
    first = max(i for i, edge in enumerate(edges) if edge <= values.least)
    last = min(i for i, edge in enumerate(edges) if edge > values.most)
    return edges[first : last + 1]


def _histogram(name: str, title: str, values: Distribution, edges: list[float], label: Any, unit: str) -> Any:
    counts = values.binned(edges)
    about = (
        f"Half of {values.number:,} rows have at most {number(round(values.quantile(0.5)))} {unit}, nineteen of twenty "
        f"at most {number(round(values.quantile(0.95)))}, all at most {number(round(values.most))}."
    )
    return charts.histogram(name.replace("_", "-"), title, [label(edge) for edge in edges], counts, about)


def _milliseconds(value: float) -> str:
    return f"{short(value)} ms" if value < 1000 else f"{short(value / 1000)} s"


# --- savings and errors ---------------------------------------------------------------------------------------------


def _savings(figures: Figures) -> dict[str, dict[str, int]]:
    return {"prompts": figures.savings["prompt"], "answers": figures.savings["completion"]}


def _about_savings(figures: Figures) -> str:
    told = [
        f"{name}: " + ", ".join(f"{number:,} {part}" for part, number in parts.items())
        for name, parts in _savings(figures).items()
    ]
    return f"Tokens of {'; of '.join(told)}."


def _errors(run: PublishedRun) -> list[dict[str, Any]]:
    counts = run.manifest["errors_by_reason"]
    return [
        {"reason": reason, "number": counts[reason], "lines": [_line(row) for row in rows]}
        for reason, rows in first_errors(run).items()
    ]


def _line(row: dict[str, Any]) -> dict[str, Any]:
    raw = (row["raw"] or b"")[: 4 * _MAX_RAW].decode(errors="backslashreplace")
    return {**row, "raw": raw if len(raw) <= _MAX_RAW else f"{raw[:_MAX_RAW]}…"}


def _reasons(counts: Mapping[str, int]) -> Any:
    if not counts:
        return None
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    about = ", ".join(f"{number:,} {reason}" for reason, number in ranked)
    return charts.reasons(dict(ranked[:12]), f"Failed rows: {about}.")


# --- settings, and the runs before ----------------------------------------------------------------------------------


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as names with dots, and their values as JSON; without those that aren't set."""
    told = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            told += flat(value, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            told.append((f"{prefix}{name}", text))
    return told


def _kinds(figures: Figures) -> list[tuple[str, str]]:
    """How many answers each model gave, and how many choices ended for which reason."""
    models = [(f"model {name}", f"{number:,}") for name, number in figures.models.most_common(_MAX_INPUTS)]
    return models + [(f"finish_reason {name}", f"{number:,}") for name, number in figures.finish_reasons.most_common()]


def _changes(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run's manifest says of its differences from an earlier one: rows by kind."""
    changes = manifest.get("changes")
    if not isinstance(changes, Mapping):
        return []
    return [(name.replace("_", " "), f"{value:,}") for name, value in changes.items() if isinstance(value, int)]


def _trend(output: Folder, run: PublishedRun) -> dict[str, Any]:
    """The published runs up to this one, where there are several; the oldest first."""
    ids = [name for name in output.join("runs").names() if name <= run.id][-MAX_RUNS:]
    runs = [told for name in ids if (told := _told_by(output, name)) is not None]
    if len(runs) < 2:
        return {"trend": [], "trend_charts": []}
    drawn = [("wide", charts.trend(runs, charts.FULL)), ("narrow", charts.trend(runs, charts.NARROW))]
    return {"trend": runs, "trend_charts": drawn}


def _told_by(output: Folder, run_id: str) -> dict[str, Any] | None:
    """What a trend tells of a run; None where it isn't published, or was by a version that says something else."""
    try:
        manifest = json.loads(output.read("runs", run_id, "manifest.json"))
        computed, seconds = manifest["computed"], manifest["timings_s"]["infer"]
        ended = datetime.fromisoformat(manifest["ended"])
        return {
            "id": manifest["run_id"],
            "ended": ended.strftime("%Y-%m-%d %H:%M"),
            "day": ended.strftime("%m-%d"),
            "input": manifest["rows"]["input"],
            # Of a run that went on, what it answered before it was broken off is among the answered ones, too.
            "answered": manifest["rows"]["responses"] - manifest["rows_carried"],
            "carried": manifest["rows_carried"],
            "errors": manifest["rows"]["errors"],
            "tokens": computed["completion_tokens"],
            "tokens_per_s": computed["completion_tokens"] / seconds if seconds else 0.0,
            "total_s": manifest["timings_s"]["total"],
            "time": clock(manifest["timings_s"]["total"]),
            "cost": manifest["cost"],
            "changes": ", ".join(f"{number} {kind}" for kind, number in _changes(manifest) if number != "0"),
        }
    except (FileNotFoundError, NotADirectoryError, StorageFailed, ValueError, KeyError, TypeError):
        return None
