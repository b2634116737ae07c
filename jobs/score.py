"""`overnight score`: answer every line of JSONL files, and publish the answers as Parquet."""

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":
    # `python jobs/score.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs import options
from jobs.config import CONTEXT, ConfigOption, make_app
from jobs.exits import ExitStatus
from jobs.interrupts import carry_out
from schemas.failures import UsageError

if TYPE_CHECKING:
    from schemas.requests import Tally
    from schemas.settings import RunSettings

app = make_app()


@app.command(context_settings=CONTEXT)
def score(
    inputs: options.Inputs,
    output: Annotated[str, typer.Option("--output", help="Folder or s3:// URI for the tables.")],
    model: options.Model = None,
    served_names: options.ServedNames = None,
    adapters: options.Adapters = None,
    replicas: Annotated[
        str, typer.Option(metavar="N|auto", help="Engines. auto: one for each GPU, else one a machine.")
    ] = "auto",
    through: Annotated[
        str | None,
        typer.Option(metavar="serve:APP", help="Use the engines of an endpoint that is up, which goes first there."),
    ] = None,
    engine: options.Engine = None,
    fill: options.Fill = None,
    endpoint: options.EndpointKind = None,
    strict: options.Strict = False,
    limit: options.Limit = None,
    sample: options.Sample = None,
    no_dedup: options.NoDedup = False,
    price: options.Price = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan alone, and say what the run would take: no engine starts.")
    ] = False,
    allow_errors: Annotated[
        bool,
        typer.Option("--allow-errors", help="Exit with 0 though rows failed, when one at least was answered."),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew, whatever stands in the output folder; published runs stay.")
    ] = False,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed",
            help="A new run that takes over the last one's answers to equal requests, and asks the rest.",
        ),
    ] = False,
    retry_errors: Annotated[
        bool,
        typer.Option("--retry-errors", help="Try rows again that failed for no fault of their own."),
    ] = False,
    max_errors: Annotated[
        str | None, typer.Option("--max-errors", metavar="N|P%", help="Stop when more rows than this have failed.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline",
            metavar="HH:MM|DATETIME",
            help="When it must be done: whether it will be is told all along, and through an endpoint it goes first.",
        ),
    ] = None,
    keep_work: Annotated[bool, typer.Option("--keep-work", help="Keep spool and staged parts below _work/.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.html into the run's folder.")] = False,
    verbose: options.Verbose = False,
    log_format: options.LogFormat = "text",
    config: ConfigOption = None,
) -> None:
    """Answer every line of JSONL files of completion requests, and publish responses, usage and errors as Parquet.

    The same command goes on where a run was broken off, and does nothing where it is finished.

    While it runs, `overnight status --output …` tells how far it is; how it ended stands in the output's summary.json.

    Exit status: 0 all rows answered, 3 finished with row errors, 4 stopped at --max-errors, 2 wrong usage, 1 failed,
    130/143 interrupted.
    """

    def work() -> int:
        options.choose_log_format(log_format)
        settings = make_settings(
            inputs=inputs,
            output=output,
            model=model,
            served_names=served_names,
            adapters=adapters,
            replicas=replicas,
            through=through,
            engine=engine,
            fill=fill,
            endpoint=endpoint,
            strict=strict,
            limit=limit,
            sample=sample,
            no_dedup=no_dedup,
            price=price,
            restart=restart,
            changed=changed,
            retry_errors=retry_errors,
            max_errors=max_errors,
            deadline=deadline,
            keep_work=keep_work,
            verbose=verbose,
        )
        return forecast(settings) if dry_run else run(settings, allow_errors, with_report=not no_report)

    def end(error: BaseException | None, status: int, words: str | None) -> None:
        from pipelines.endings import write_end

        if not dry_run:
            write_end(output, error, status, words)

    raise typer.Exit(carry_out(work, "; what is finished is kept: the same command goes on from there", end))


def make_settings(
    *,
    output: str,
    replicas: str,
    through: str | None,
    no_dedup: bool,
    price: list[str] | None,
    restart: bool,
    changed: bool,
    retry_errors: bool,
    max_errors: str | None,
    deadline: str | None,
    keep_work: bool,
    **shared: Any,
) -> "RunSettings":
    """The settings of a run, from what its options were given; `shared` are those of `options.input_settings`. Raises
    UsageError that names the flag."""
    from schemas.settings import RunSettings, parse_deadline, parse_max_errors, parse_prices

    if restart and changed:
        raise UsageError("--restart computes all anew, and --changed does not. Give one of them")
    if through is not None and not re.fullmatch(r"serve:.+", through):
        raise UsageError(f"--through {through}: expected serve:APP, with the name of a Serve application")
    if output == "":
        raise UsageError("--output: found nothing, expected a path or URI. Is a variable unset?")
    return RunSettings(
        output=output,
        replicas=_parse_replicas(replicas),
        through=through,
        keep_work=keep_work,
        restart=restart,
        changed=changed,
        retry_errors=retry_errors,
        dedup=not no_dedup,
        max_errors=parse_max_errors(max_errors),
        due=parse_deadline(deadline, time.time()),
        prices=parse_prices(price or []),
        **options.input_settings(**shared),
    )


def run(settings: "RunSettings", allow_errors: bool, with_report: bool = True) -> int:
    """Carry a run out, and return its exit status."""
    from jobs.console import RunView
    from jobs.report import write_beside
    from jobs.reports import print_summary
    from pipelines import batch

    with RunView() as view:
        summary = batch.run(settings, view)
        report = None
        if with_report and not summary.is_repeat:
            view.phase("writing the report")
            report = write_beside(settings.output, summary.run_id)
    print_summary(summary, report)
    return status_of(summary.totals, allow_errors)


def status_of(totals: "Tally", allow_errors: bool) -> int:
    """The exit status of a run that has come to its end."""
    if not totals.num_failed or (allow_errors and totals.num_answered):
        return ExitStatus.OK
    return ExitStatus.ROW_ERRORS


def forecast(settings: "RunSettings") -> int:
    """Say what a run would do, and return an exit status as that of `check`."""
    from jobs.console import RunView
    from jobs.reports import print_forecast
    from pipelines import forecast as forecasting

    with RunView() as view:
        told = forecasting.forecast(settings, view)
    print_forecast(told)
    return ExitStatus.ROW_ERRORS if told.validated.num_failed else ExitStatus.OK


def _parse_replicas(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--replicas {text}: expected a whole number from 1, or auto")
    return int(text)


if __name__ == "__main__":
    app(prog_name="score.py")
