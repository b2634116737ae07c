"""`overnight status`: how far the run into a folder is, from another process or machine."""

import json
import sys
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    # `python jobs/status.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs.config import CONTEXT, ConfigOption, make_app
from jobs.exits import ExitStatus
from jobs.interrupts import carry_out
from schemas.failures import UsageError

app = make_app()


@app.command(context_settings=CONTEXT)
def status(
    output: Annotated[str, typer.Option("--output", help="Folder or s3:// URI that `score --output` writes to.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's status file, or its manifest.")] = False,
    config: ConfigOption = None,
) -> None:
    """Tell how far the run into a folder is; where none is under way, what the last one came to.

    Exit status: 0 there is one, 2 there is none or wrong usage, 1 failed.
    """
    raise typer.Exit(carry_out(lambda: run(output, as_json)))


def run(output: str, as_json: bool) -> int:
    """Look, tell, and return an exit status."""
    if output == "":
        raise UsageError("--output: found nothing, expected a path or URI. Is a variable unset?")
    from jobs.reports import print_finished, print_status
    from pipelines.progress import read_status
    from pipelines.storage import Folder
    from pipelines.write import read_manifest

    folder = Folder.at(output)
    said, finished = read_status(folder), read_manifest(folder)
    if said is None and finished is None:
        raise UsageError(f"{output}: holds no run, neither under way nor finished. Is it what score --output names?")
    if as_json:
        typer.echo(json.dumps(said or finished, indent=2, ensure_ascii=False))
    elif said is not None:
        print_status(said)
    elif finished is not None:
        print_finished(finished)
    return ExitStatus.OK


if __name__ == "__main__":
    app(prog_name="status.py")
