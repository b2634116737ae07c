"""`overnight report`: a run as a page to look at, and its rows as one to read."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

if __name__ == "__main__":
    # `python jobs/report.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs.config import CONTEXT, ConfigOption, make_app
from jobs.exits import ExitStatus
from jobs.interrupts import carry_out
from jobs.options import say
from schemas.failures import UsageError

if TYPE_CHECKING:
    from pipelines.report_rows import Order

app = make_app()
_ORDERS = ("input", "slowest", "longest")


@app.command(context_settings=CONTEXT)
def report(
    output: Annotated[str, typer.Option("--output", help="Folder or s3:// URI that `score --output` wrote.")],
    run_id: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN_ID", envvar="OVERNIGHT_RUN", help="A run. Default: the current one."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="FILE", help="Where to write the page. Default: report.html in the run's own folder."
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Write a second page that holds so many answers and errors to read."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Rows for --rows: by id, file, line, model, finish_reason, reason or contains. Repeatable.",
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="ORDER", help="Rows for --rows: the first of the input, the slowest or the longest.")
    ] = "input",
    whole: Annotated[bool, typer.Option("--whole", help="Rows for --rows: however long they are.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show a run as one HTML file: speed over time, times and tokens of rows, savings, errors, cost, the last runs.

    The file loads nothing from anywhere. Exit status: 0 written, 2 wrong usage, 1 failed, 130/143 interrupted.
    """
    raise typer.Exit(carry_out(lambda: run(output, run_id, to, rows, where or [], sort, whole)))


def run(
    output: str, run_id: str | None, to: str | None, rows: int | None, where: list[str], sort: str, whole: bool
) -> int:
    """Write the pages, say where, and return an exit status."""
    for flag, value in (("--output", output), ("--run", run_id), ("--to", to)):
        if value == "":
            expected = "the id of a run" if flag == "--run" else "a path or URI"
            raise UsageError(f"{flag}: found nothing, expected {expected}. Is a variable unset?")
    if sort not in _ORDERS:
        raise UsageError(f"--sort {sort}: expected {', '.join(_ORDERS)}")
    if rows is None and (where or whole or sort != "input"):
        raise UsageError("--where, --sort and --whole say which rows --rows shows. Give --rows N with them")
    from pipelines.report import write_report
    from pipelines.report_rows import Wanted, parse_where

    wanted = None if rows is None else Wanted(rows, parse_where(where), cast("Order", sort), whole)
    written = write_report(output, run_id, to, wanted)
    typer.echo(f"run {written.run_id}")
    for path in written.paths:
        typer.echo(path)
    if written.num_rows is not None:
        typer.echo(f"{written.num_rows:,} {'row' if written.num_rows == 1 else 'rows'} to read")
    return ExitStatus.OK


def write_beside(output: str, run_id: str) -> str | None:
    """Write a published run's report, and return where it is. The run is whole without it: None where it fails."""
    from pipelines.report import write_report

    try:
        return write_report(output, run_id).paths[0]
    except Exception as error:  # whatever it is, it is no fault of the run
        words = " ".join(str(error).split()) or type(error).__name__
        say(f"the run is published, and its report isn't written: {words}", ExitStatus.OK)
        return None


if __name__ == "__main__":
    app(prog_name="report.py")
