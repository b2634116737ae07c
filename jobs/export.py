"""`overnight export`: the answers of a run as the files that OpenAI's Batch API gives."""

import sys
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    # `python jobs/export.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs.config import CONTEXT, ConfigOption, make_app
from jobs.exits import ExitStatus
from jobs.interrupts import carry_out
from schemas.failures import UsageError

app = make_app()


@app.command(context_settings=CONTEXT)
def export(
    source: Annotated[
        str, typer.Option("--from", envvar="OVERNIGHT_FROM", help="Folder or s3:// URI that `score --output` wrote.")
    ],
    output: Annotated[
        str, typer.Option("--output", help="Folder or s3:// URI for output.jsonl and errors.jsonl; replaces them.")
    ],
    run_id: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN_ID", envvar="OVERNIGHT_RUN", help="A run. Default: the current one."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Write a run's answers and errors as JSONL in the form of OpenAI's Batch API.

    Exit status: 0 both files are written, 2 wrong usage, 1 failed, 130/143 interrupted.
    """
    raise typer.Exit(carry_out(lambda: run(source, run_id, output), "; nothing was written"))


def run(source: str, run_id: str | None, output: str) -> int:
    """Carry an export out, and return its exit status."""
    for flag, value in (("--from", source), ("--output", output), ("--run", run_id)):
        if value == "":
            expected = "the id of a run" if flag == "--run" else "a path or URI"
            raise UsageError(f"{flag}: found nothing, expected {expected}. Is a variable unset?")
    from pipelines import export as exporting

    exported = exporting.export(source, run_id, output)
    typer.echo(f"run {exported.run_id}")
    for path, number in exported.num_lines.items():
        typer.echo(f"{path}: {number:,} {'line' if number == 1 else 'lines'}")
    return ExitStatus.OK


if __name__ == "__main__":
    app(prog_name="export.py")
