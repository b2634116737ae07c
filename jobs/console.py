"""What a person sees of a run: a bar on a terminal, lines elsewhere, and the summary."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pipelines.batch import Summary
from pipelines.check import Report
from pipelines.progress import Progress as RunProgress
from schemas.rules import plain

LINE_EVERY_S = 5.0
# Refused lines, and names of unknown fields, that are shown.
MAX_PRINTED = 50


class RunView:
    """Shows a run on standard error, so that standard output holds the summary alone."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, detail="")
        self._last_line = 0.0

    def __enter__(self) -> "RunView":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=text, total=None, detail="")
        if not self.console.is_terminal:
            self._line(text)

    def checked(self, num_rows: int) -> None:
        self._bar.update(self._task, detail=f"{num_rows:,} lines")
        if not self.console.is_terminal and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._line(f"{num_rows:,} lines checked")

    def progress(self, now: RunProgress) -> None:
        if not now.num_replicas_up:
            return
        detail = describe(now)
        self._bar.update(
            self._task,
            description="answering",
            total=now.total_rows,
            completed=now.done.num_done,
            detail=detail,
        )
        if not self.console.is_terminal and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._line(f"{now.done.num_done:,} of {now.total_rows:,} rows, {detail}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: T201 - a line of a log


def describe(now: RunProgress) -> str:
    """`3 failed, 128 in flight, 512 tokens/s, 0:42 left`"""
    words = [
        f"{now.done.num_failed:,} failed" if now.done.num_failed else "",
        f"{now.num_in_flight:,} in flight",
        f"{now.tokens_per_s:,.0f} tokens/s",
        f"{_clock(now.remaining_s)} left" if now.remaining_s is not None else "",
    ]
    return ", ".join(word for word in words if word)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_report(report: Report, to_stderr: bool = False) -> None:
    """What a check found: the refused lines, then the counts."""
    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if report.num_rejected and not to_stderr:
        listed = len(report.rejections)
        is_cut = listed < report.num_rejected
        for row in report.rejections[:MAX_PRINTED]:
            console.print(row["message"])
        if (more := report.num_rejected - MAX_PRINTED) > 0:
            console.print(f"… and {more:,} more: --json lists {'the first ' if is_cut else 'all '}{listed:,}")
        console.print()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("lines", f"{report.num_rows:,}: {report.num_accepted:,} accepted, {report.num_rejected:,} refused")
    _add_counts(table, report.reasons)
    for endpoint, number in sorted(report.endpoints.items()):
        table.add_row(endpoint, f"{number:,}")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}, at most {report.longest_prompt:,} in a request")
    console.print(table)
    _print_unknown(console, report.unknown_fields)


def _add_counts(table: Table, reasons: dict[str, int]) -> None:
    for reason, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        table.add_row("", f"  {number:,} {reason}")


def _print_unknown(console: Console, unknown_fields: dict[str, int]) -> None:
    if unknown_fields:
        names = sorted(unknown_fields, key=lambda name: (-unknown_fields[name], name))
        fields = ", ".join(f"{plain(name)} ({unknown_fields[name]:,})" for name in names[:MAX_PRINTED])
        if (more := len(names) - MAX_PRINTED) > 0:
            fields += f" and {more:,} more"
        console.print(f"\nfields that the schema doesn't know, with their rows: {fields}. Is one misspelt?")


def print_summary(summary: Summary) -> None:
    """The closing words of a run, on standard output."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    totals = summary.totals
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("rows", f"{summary.num_rows:,}: {totals.num_answered:,} answered, {totals.num_failed:,} failed")
    _add_counts(table, totals.reasons)
    table.add_row("tokens", f"{totals.prompt_tokens:,} in, {totals.completion_tokens:,} out")
    table.add_row("speed", f"{summary.tokens_per_s:,.0f} tokens/s over {_clock(summary.infer_s)}")
    table.add_row("time", f"{_clock(summary.total_s)} in all")
    table.add_row("files", summary.folder)
    console.print(table)
    if number := totals.num_cut_by_default:
        answers = "1 answer was" if number == 1 else f"{number:,} answers were"
        console.print(f"\n{answers} cut at 16 tokens, the schema's default: give max_tokens.")
    _print_unknown(console, totals.unknown_fields)
    console.print("\nopen it with")
    console.print(f"  duckdb -c \"FROM '{summary.tables['responses']}' SELECT id, text\"")
    folder = summary.tables["responses"].removesuffix("/*.parquet")
    console.print(f"  python -c \"import pandas; print(pandas.read_parquet('{folder}')[['id', 'text']])\"")
    if totals.num_failed:
        console.print(f"  duckdb -c \"FROM '{summary.tables['errors']}' SELECT source_file, source_line, message\"")
