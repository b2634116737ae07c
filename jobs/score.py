"""`overnight score`: answer every line of JSONL files, and publish the answers as Parquet."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

if __name__ == "__main__":
    # `python jobs/score.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs.config import CONTEXT, ConfigOption, make_app
from jobs.exits import ExitStatus
from schemas.failures import EngineUnusable, UsageError

if TYPE_CHECKING:
    from schemas.settings import RunSettings

app = make_app()


@app.command(context_settings=CONTEXT)
def score(
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            envvar="OVERNIGHT_INPUT",
            help="JSONL file, folder, glob or s3:// URI; plain, gzip or zstd. Repeatable.",
        ),
    ],
    output: Annotated[str, typer.Option("--output", help="Folder or s3:// URI for the tables.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, s3:// folder, or hub name (owner/name@revision). Default: the embedded 135M model."
        ),
    ] = None,
    served_name: Annotated[
        list[str] | None, typer.Option(help="Name under which requests ask for the model. Repeatable.")
    ] = None,
    replicas: Annotated[
        str, typer.Option(metavar="N|auto", help="Engines. auto: one for each GPU, else one a machine.")
    ] = "auto",
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="An engine setting, such as dtype=float32. Repeatable."),
    ] = None,
    allow_errors: Annotated[
        bool,
        typer.Option("--allow-errors", help="Exit with 0 though rows failed, when one at least was answered."),
    ] = False,
    keep_work: Annotated[bool, typer.Option("--keep-work", help="Keep spool and staged parts below _work/.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let vLLM and Ray log.")] = False,
    config: ConfigOption = None,
) -> None:
    """Answer every line of JSONL files of completion requests, and publish responses, usage and errors as Parquet.

    Exit status: 0 all rows answered, 3 finished with row errors, 2 wrong usage, 1 failed, 130/143 interrupted.
    """
    from schemas.settings import RunSettings, parse_engine_settings

    try:
        for flag, is_empty in (("--input", "" in inputs), ("--output", output == ""), ("--model", model == "")):
            if is_empty:
                raise UsageError(f"{flag}: found nothing, expected a path or URI. Is a variable unset?")
        settings = RunSettings(
            inputs=tuple(inputs),
            output=output,
            model=model,
            served_names=tuple(served_name or ()),
            replicas=_parse_replicas(replicas),
            engine=parse_engine_settings(engine or []),
            keep_work=keep_work,
            verbose=verbose,
        )
        status = run(settings, allow_errors)
    except UsageError as error:
        status = _say(str(error), ExitStatus.USAGE)
    raise typer.Exit(status)


def run(settings: "RunSettings", allow_errors: bool) -> int:
    """Carry a run out, and return its exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        from jobs.console import RunView, print_summary
        from pipelines import batch

        with RunView() as view:
            summary = batch.run(settings, view)
    except EngineUnusable as error:
        return _say(f"{error}. Run again with --verbose to see the engine's own log", ExitStatus.FAILED)
    except KeyboardInterrupt:
        return _say("interrupted; nothing was published", ExitStatus.INTERRUPTED)
    except _Terminated:
        return _say("terminated; nothing was published", ExitStatus.TERMINATED)
    print_summary(summary)
    if not summary.totals.num_failed or (allow_errors and summary.totals.num_answered):
        return ExitStatus.OK
    return ExitStatus.ROW_ERRORS


class _Terminated(BaseException):
    """SIGTERM came. Not an Exception, so that nothing on the way takes it for a fault of its own."""


def _terminate(*_: Any) -> NoReturn:
    raise _Terminated


def _parse_replicas(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--replicas {text}: expected a whole number from 1, or auto")
    return int(text)


def _say(message: str, status: int) -> int:
    typer.echo(f"overnight: {message}", err=True)
    return status


if __name__ == "__main__":
    app(prog_name="score.py")
