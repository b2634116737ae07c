"""`overnight nightly`: score the datasets of a file, of which only what is new or changed since the night before."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    # `python jobs/nightly.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs import options
from jobs.config import CONTEXT, make_app
from jobs.exits import ExitStatus, worst
from jobs.interrupts import Terminated, carry_out
from jobs.options import say
from schemas.failures import Busy, InputMissing, Interrupted, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import date

    from pipelines.engine import Engine
    from pipelines.nightly import Night, State
    from pipelines.progress import Show
    from schemas.nightly import Dataset, Nightly

app = make_app()


@app.command(context_settings=CONTEXT)
def nightly(
    config: Annotated[
        Path,
        typer.Option("--config", exists=True, dir_okay=False, help="YAML file of datasets; see jobs/nightly.yaml."),
    ],
    date: Annotated[
        str | None, typer.Option(metavar="YYYY-MM-DD", help="The night, for {date} in paths. Default: today.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", metavar="NAME", help="This dataset alone. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan alone, and say what the night would take.")
    ] = False,
    log_format: options.LogFormat = "text",
) -> None:
    """Score the datasets of a file: of each, the requests that are new or changed since its last published run. What is
    the same is carried over, and the difference is published in `changes`.

    Nights that were missed are caught up. The same command goes on with what the deadline cut off.

    Exit status: the worst of the datasets' own, from 0 all rows answered, 3 row errors, 5 the deadline came, 4 stopped
    at max_errors, 2 refused, 1 failed; 6 another one is still under way, 2 wrong usage, 130/143 interrupted.
    """

    def work() -> int:
        from jobs.datasets import read_nightly

        options.choose_log_format(log_format)
        told = _only(read_nightly(config), dataset or [])
        return forecast(told, _night(told, date)) if dry_run else run(told, _night(told, date))

    raise typer.Exit(carry_out(work, "; what is finished is kept: the same command goes on from there"))


def run(told: "Nightly", night: "date", start_engine: "Callable[[], Engine] | None" = None) -> int:
    """Carry a night out, and return its exit status. `start_engine` replaces vLLM, for tests."""
    from jobs.report import write_beside
    from jobs.reports import print_nights
    from pipelines import nightly as nights

    began, deadline = time.time(), told.next_deadline(time.time())
    done: list[Night] = []
    try:
        with nights.alone(told) as state:
            summary = _Summary(state, night, began, deadline)
            summary.write(done, None)
            status: int = ExitStatus.FAILED
            try:
                planned = nights.plan(told, state, night)
                for one in nights.carry_out(planned, state, deadline, _watch, start_engine):
                    done.append(one)
                    summary.write(done, None)
                    if one.dataset.has_report and one.summary is not None and not one.summary.is_repeat:
                        write_beside(one.dataset.run.output, one.summary.run_id)
                status = worst(map(_status_of, done))
            except UsageError:
                status = ExitStatus.USAGE
                raise
            except (Interrupted, KeyboardInterrupt):
                status = ExitStatus.INTERRUPTED
                raise
            except Terminated:
                status = ExitStatus.TERMINATED
                raise
            finally:
                summary.write(done, status)
                print_nights(done)
    except Busy as error:
        return say(
            f"{told.state}: a nightly run is under way there ({error.holder}). What it leaves is done the next time",
            ExitStatus.BUSY,
        )
    return status


def forecast(told: "Nightly", night: "date") -> int:
    """Say what a night would do, and return the worst exit status of its datasets' checks."""
    from jobs import score
    from pipelines import nightly as nights
    from pipelines.storage import Folder

    statuses = []
    for planned in nights.plan(told, nights.State(Folder.at(told.state)), night):
        for day in planned.nights:
            settings = planned.dataset.settings_for(day)
            typer.echo(f"{planned.dataset.name}, night of {day}: {' '.join(settings.inputs)} into {settings.output}")
            try:
                statuses.append(score.forecast(settings))
            except UsageError as error:
                if isinstance(error, InputMissing) and planned.dataset.missing == "skip":
                    typer.echo("skipped: there is no input")
                    statuses.append(ExitStatus.OK)
                else:
                    statuses.append(say(str(error), ExitStatus.USAGE))
            typer.echo()
    return worst(statuses)


class _Summary:
    """`nightly.json`: written as the night goes on, so that it is there however the night ends."""

    def __init__(self, state: "State", night: "date", began: float, deadline: float | None) -> None:
        self._state, self._night, self._began, self._deadline = state, night, began, deadline

    def write(self, done: "list[Night]", status: int | None) -> None:
        self._state.tell(
            {
                "night": self._night.isoformat(),
                "began": _when(self._began),
                "ended": None if status is None else _when(time.time()),
                "deadline": None if self._deadline is None else _when(self._deadline),
                "status": status,
                "datasets": [{**one.as_json(), "status": int(_status_of(one))} for one in done],
            }
        )


def _when(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _status_of(night: "Night") -> int:
    from jobs.score import status_of
    from pipelines.nightly import Outcome

    if night.outcome in (Outcome.SCORED, Outcome.UNCHANGED):
        assert night.summary is not None, "what has come to its end has a summary"
        return status_of(night.summary.totals, night.dataset.allow_errors)
    return {
        Outcome.SKIPPED: ExitStatus.OK,
        Outcome.UNFINISHED: ExitStatus.UNFINISHED,
        Outcome.NOT_BEGUN: ExitStatus.UNFINISHED,
        Outcome.LEFT_OUT: ExitStatus.UNFINISHED,
        Outcome.TOO_MANY_ERRORS: ExitStatus.TOO_MANY_ERRORS,
        Outcome.REFUSED: ExitStatus.USAGE,
        Outcome.FAILED: ExitStatus.FAILED,
        Outcome.INTERRUPTED: ExitStatus.INTERRUPTED,
    }[night.outcome]


@contextmanager
def _watch(dataset: "Dataset", night: "date") -> "Iterator[Show]":
    from jobs.console import RunView

    with RunView() as view:
        view.phase(f"{dataset.name}, night of {night}")
        yield view


def _only(told: "Nightly", names: list[str]) -> "Nightly":
    known = [one.name for one in told.datasets]
    for name in names:
        if name not in known:
            raise UsageError(f"--dataset {name}: no such dataset. There are: {', '.join(known)}")
    chosen = tuple(one for one in told.datasets if not names or one.name in names)
    return told.model_copy(update={"datasets": chosen})


def _night(told: "Nightly", text: str | None) -> "date":
    from datetime import date, datetime

    if text is None:
        return datetime.now(told.zone).date()
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--date {text}: expected a date as YYYY-MM-DD, such as 2026-10-01") from None


if __name__ == "__main__":
    app(prog_name="nightly.py")
