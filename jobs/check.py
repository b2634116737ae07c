"""`overnight check`: judge every line of JSONL files as a run would, without an engine."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    # `python jobs/check.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs import options
from jobs.config import CONTEXT, ConfigOption, make_app
from jobs.exits import ExitStatus
from jobs.interrupts import carry_out

if TYPE_CHECKING:
    from schemas.settings import InputSettings

app = make_app()


@app.command(context_settings=CONTEXT)
def check(
    inputs: options.Inputs,
    model: options.Model = None,
    served_names: options.ServedNames = None,
    adapters: options.Adapters = None,
    engine: options.Engine = None,
    fill: options.Fill = None,
    endpoint: options.EndpointKind = None,
    strict: options.Strict = False,
    limit: options.Limit = None,
    sample: options.Sample = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each rejection as a line of JSON, the counts on standard error.")
    ] = False,
    verbose: options.Verbose = False,
    config: ConfigOption = None,
) -> None:
    """Judge every line of JSONL files as `score` would before it takes an engine: no engine is started.

    Exit status: 0 a run would take every line, 3 some lines are refused, 2 wrong usage, 1 failed, 130/143 interrupted.
    """

    def work() -> int:
        from schemas.settings import InputSettings

        shared = options.input_settings(
            inputs=inputs,
            model=model,
            served_names=served_names,
            adapters=adapters,
            engine=engine,
            fill=fill,
            endpoint=endpoint,
            strict=strict,
            limit=limit,
            sample=sample,
            verbose=verbose,
        )
        return run(InputSettings(**shared), as_json)

    raise typer.Exit(carry_out(work))


def run(settings: "InputSettings", as_json: bool) -> int:
    """Carry a check out, and return its exit status."""
    from jobs.console import RunView
    from jobs.reports import print_report
    from pipelines import check as checking

    with RunView() as view:
        report = checking.check(settings, view)
    if as_json:
        for row in report.rejections:
            typer.echo(json.dumps(row, ensure_ascii=False))
    print_report(report, to_stderr=as_json)
    return ExitStatus.ROW_ERRORS if report.num_rejected else ExitStatus.OK


if __name__ == "__main__":
    app(prog_name="check.py")
