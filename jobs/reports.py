"""What a person reads of a check, a plan, a run: on standard output, when it is over or asked for."""

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.console import clock, late
from pipelines.check import Report
from pipelines.forecast import Forecast
from pipelines.manifest import Summary
from pipelines.nightly import Night
from pipelines.placement import count
from schemas.rules import plain

# Refused lines, and names of unknown fields, that are shown.
MAX_PRINTED = 50
# A run that writes no status for so long has probably gone.
SILENT_S = 60.0


def print_forecast(told: Forecast) -> None:
    """What a run would do, on standard output."""
    totals, estimate = told.totals, told.estimate
    table = _table()
    table.add_row("lines", f"{told.num_rows:,}: {totals.num_rows:,} accepted, {told.validated.num_failed:,} refused")
    _add_counts(table, told.validated.reasons)
    if told.validated.num_carried:
        table.add_row("", f"{told.validated.num_carried:,} more have an earlier run's answer")
    requests = totals.num_rows - totals.num_repeated
    table.add_row("requests", f"{requests:,} for the engine, {totals.num_repeated:,} answered by an equal one's answer")
    table.add_row("chunks", f"{told.num_chunks:,} for {count(told.num_replicas, 'replica')}")
    table.add_row("prompts", f"{totals.prompt_tokens:,} tokens")
    table.add_row("", f"  {_share(totals.repeated_tokens, totals.prompt_tokens)} saved by equal requests")
    table.add_row("", f"  {_share(totals.shared_tokens, totals.prompt_tokens)} saved by shared beginnings, at best")
    at_most = "at most " if told.experience is None else "about "
    table.add_row("answers", f"{at_most}{estimate.completion_tokens:,} tokens to compute")
    if estimate.seconds is not None and told.experience is not None:
        table.add_row("time", f"about {clock(estimate.seconds)}, by run {told.experience.run_id}; without the start")
    else:
        table.add_row("time", "unknown: no run of this model in this output folder to go by")
    if estimate.cost is not None:
        table.add_row("cost", f"{at_most}{estimate.cost:,.2f}")
    _console().print(table)
    _print_unknown(_console(), told.validated.unknown_fields)


def print_status(said: dict[str, Any]) -> None:
    """What a run under way says of itself, on standard output."""
    table = _table()
    silent_s = max(0.0, time.time() - said["written"])
    table.add_row("run", f"{said['run_id']}: {said['phase']}, {clock(silent_s)} ago")
    if "error" in said:
        table.add_row("ended", said["error"])
    table.add_row("for", clock(said.get("ended", time.time()) - said["began"]))
    if (rows := said.get("rows")) is not None:
        failed = f", {rows['failed']:,} failed" if rows["failed"] else ""
        answered = f"{rows['answered']:,} of {rows['total']:,} answered"
        table.add_row("rows", f"{answered}{failed}, {rows['in_flight']:,} in flight")
        _add_counts(table, said["errors_by_reason"])
        left = f", {clock(said['remaining_s'])} left" if said["remaining_s"] is not None else ""
        table.add_row("speed", f"{said['tokens_per_s']:,.0f} tokens/s{left}")
        if said.get("late_s") is not None:
            table.add_row("deadline", late(said["late_s"]))
        for number, waiting in enumerate(said["oldest_in_flight"]):
            table.add_row("" if number else "oldest", f"{waiting['row']}, for {clock(waiting['age_s'])}")
        if said["stalled"]:
            table.add_row("stalled", "nothing is finished any more where these wait")
    elif "lines_checked" in said:
        table.add_row("lines", f"{said['lines_checked']:,} checked")
    _console().print(table)
    if "error" in said:
        _console().print("\nThe same command goes on from there.")
    elif silent_s > SILENT_S and said.get("rows"):
        _console().print("\nIt says nothing any more: it may have been killed. Look at its log, and run it again.")


def print_finished(manifest: dict[str, Any]) -> None:
    """What a finished run came to, by its manifest, on standard output."""
    table = _table()
    rows = manifest["rows"]
    table.add_row("run", f"{manifest['run_id']}: finished at {manifest['ended']}")
    table.add_row("rows", f"{rows['input']:,}: {rows['responses']:,} answered, {rows['errors']:,} failed")
    _add_counts(table, manifest["errors_by_reason"])
    table.add_row("time", f"{clock(manifest['timings_s']['total'])} in all")
    _console().print(table)


def print_report(report: Report, to_stderr: bool = False) -> None:
    """What a check found: the refused lines, then the counts."""
    console = _console(to_stderr)
    if report.num_rejected and not to_stderr:
        listed = len(report.rejections)
        is_cut = listed < report.num_rejected
        for row in report.rejections[:MAX_PRINTED]:
            console.print(row["message"])
        if (more := report.num_rejected - MAX_PRINTED) > 0:
            console.print(f"… and {more:,} more: --json lists {'the first ' if is_cut else 'all '}{listed:,}")
        console.print()
    table = _table()
    table.add_row("lines", f"{report.num_rows:,}: {report.num_accepted:,} accepted, {report.num_rejected:,} refused")
    _add_counts(table, report.reasons)
    for endpoint, number in sorted(report.endpoints.items()):
        table.add_row(endpoint, f"{number:,}")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}, at most {report.longest_prompt:,} in a request")
    console.print(table)
    _print_unknown(console, report.unknown_fields)


def _console(to_stderr: bool = False) -> Console:
    return Console(stderr=to_stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _table() -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


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


def print_summary(summary: Summary, report: str | None = None) -> None:
    """The closing words of a run, on standard output; `report`: where its page is."""
    console, totals = _console(), summary.totals
    table = _table()
    table.add_row("rows", f"{summary.num_rows:,}: {totals.num_answered:,} answered, {totals.num_failed:,} failed")
    _add_counts(table, totals.reasons)
    table.add_row("tokens", f"{totals.prompt_tokens:,} in, {totals.completion_tokens:,} out")
    if summary.is_repeat:
        table.add_row("", "finished before, and nothing has changed: --restart runs it anew")
        table.add_row("files", summary.folder)
        console.print(table)
        return
    if (before := totals.num_done - summary.now.num_done - summary.num_refused - totals.num_carried) > 0:
        table.add_row("", f"{before:,} of them before the run was broken off")
    if totals.num_carried:
        table.add_row("", f"{totals.num_carried:,} of them carried over from an earlier run")
    if (changes := summary.changes) is not None:
        table.add_row("changes", f"{_changes(changes)}; beside run {changes['against']}")
    if totals.num_deduplicated:
        table.add_row("saved", f"{totals.num_deduplicated:,} rows answered by an equal one's answer")
    if totals.cached_tokens:
        computed = totals.prompt_tokens - totals.deduplicated_prompt_tokens
        table.add_row("", f"{_share(totals.cached_tokens, computed)} of the prompts' tokens found in the cache")
    if summary.cost is not None:
        table.add_row("cost", f"{summary.cost:,.2f}")
    table.add_row("speed", f"{summary.tokens_per_s:,.0f} tokens/s over {clock(summary.infer_s)}")
    table.add_row("time", f"{clock(summary.total_s)} in all")
    if summary.late_s is not None:
        table.add_row("deadline", late(summary.late_s))
    table.add_row("files", summary.folder)
    if report is not None:
        table.add_row("report", report)
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


def print_nights(nights: list[Night]) -> None:
    """What became of each dataset's night, on standard output."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in nights:
        table.add_row(one.dataset.name, one.night.isoformat(), one.outcome.value, _night_in_words(one))
    console = _console()
    console.print(table)
    for one in nights:
        if one.message:
            console.print(f"{one.dataset.name}, night of {one.night}: {one.message}")
        if one.removed:
            console.print(f"{one.dataset.name}: {count(len(one.removed), 'old run')} removed")


def _night_in_words(one: Night) -> str:
    if one.summary is None:
        return ""
    told = one.as_json()
    rows = told["rows"]
    words = (
        f"{rows['input']:,} rows: {rows['asked']:,} asked, {rows['carried']:,} carried over, {rows['failed']:,} failed"
    )
    if told["changes"] is not None:
        words += f"; {_changes(told['changes'])}"
    return f"{words}; {clock(one.seconds)}"


def _changes(counts: dict[str, Any]) -> str:
    named = [f"{counts[kind]:,} {kind}" for kind in ("new", "changed", "gone")]
    return f"{', '.join(named)}, {counts['changed_answer']:,} answered otherwise"
