"""Every night: datasets in the order of their priorities, each a run of its own (`pipelines/batch.py`) into its own
folder, beside the one of the night before.

STATE/nights/<dataset>.json   which night is the last that is done
STATE/nightly.json            what the last time came to
STATE/_work/lease.json        who is at it
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta
from enum import StrEnum
from threading import Event
from typing import Any

from pipelines import batch, cluster, retention
from pipelines.engine import Engine
from pipelines.lease import Lease
from pipelines.manifest import Summary
from pipelines.progress import Progress, Show
from pipelines.storage import Folder
from schemas.failures import EngineUnusable, InputMissing, Interrupted, StorageFailed, TooManyErrors, UsageError
from schemas.nightly import Dataset, Nightly

log = logging.getLogger("overnight.nightly")


class Outcome(StrEnum):
    """What became of a dataset's night."""

    SCORED = "scored"
    # The published run is of the very same rows.
    UNCHANGED = "unchanged"
    # There was no input, and needn't be one.
    SKIPPED = "skipped"
    # The deadline came; what is finished is kept.
    UNFINISHED = "unfinished"
    # The deadline came before, or an earlier night of it isn't done.
    NOT_BEGUN = "not begun"
    TOO_MANY_ERRORS = "too many errors"
    REFUSED = "refused"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    # Nights that were missed, and are more than are caught up.
    LEFT_OUT = "left out"


_DONE = {Outcome.SCORED, Outcome.UNCHANGED, Outcome.SKIPPED}


@dataclass(slots=True)
class Night:
    """A dataset's night: what became of it, and why; what its run came to, where it has come to its end."""

    dataset: Dataset
    night: date
    outcome: Outcome
    message: str | None = None
    summary: Summary | None = None
    seconds: float = 0.0
    # Ids of runs that retention removed.
    removed: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "dataset": self.dataset.name,
            "night": self.night.isoformat(),
            "outcome": self.outcome.value,
            "message": self.message,
            "output": self.dataset.run.output,
            "seconds": round(self.seconds, 1),
            "runs_removed": self.removed,
        }
        if self.summary is not None:
            totals, now = self.summary.totals, self.summary.now
            told |= {
                "run_id": self.summary.run_id,
                "rows": {
                    "input": self.summary.num_rows,
                    "answered": totals.num_answered,
                    "failed": totals.num_failed,
                    "carried": totals.num_carried,
                    # Those that an engine was asked now.
                    "asked": now.num_done - now.num_deduplicated,
                },
                "errors_by_reason": totals.reasons,
                "computed_tokens": now.computed_tokens,
                "cost": self.summary.cost,
                "changes": None if self.summary.is_repeat else self.summary.changes,
            }
        return told


@dataclass(frozen=True)
class State:
    """What stands from one night to the next."""

    folder: Folder
    # Raises UsageError where another process has taken it over.
    check: Callable[[], None] = lambda: None

    def done(self, dataset: str) -> date | None:
        """The last night of a dataset that is done. Raises UsageError where what says so can't be read."""
        try:
            return date.fromisoformat(json.loads(self.folder.read("nights", f"{dataset}.json"))["done"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.folder.show('nights', dataset)}.json: found no date that is done. Remove the file, to begin "
                "with this night"
            ) from error

    def begin(self, dataset: str, night: date) -> None:
        """Say which night is the first of a dataset, so that it is caught up, too; of a known one nothing."""
        if self.done(dataset) is None:
            self.finish(dataset, night - timedelta(days=1))

    def finish(self, dataset: str, night: date) -> None:
        """Say that a night is done; a later one stays what it is."""
        done = self.done(dataset)
        if done is None or done < night:
            self.folder.write(_to_json({"dataset": dataset, "done": night.isoformat()}), "nights", f"{dataset}.json")

    def tell(self, told: dict[str, Any]) -> None:
        """Write what this time has come to by now."""
        self.folder.write(_to_json(told), "nightly.json")


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


@contextmanager
def alone(nightly: Nightly) -> Iterator[State]:
    """The state, for one process at a time. Raises Busy where another one is at it."""
    folder = Folder.at(nightly.state)
    with Lease(folder) as lease:
        yield State(folder, lease.check)


@dataclass(frozen=True, slots=True)
class Planned:
    """A dataset's nights up to this one, in order; the first and the last of those that are left out."""

    dataset: Dataset
    nights: list[date]
    left_out: tuple[date, date] | None


def plan(nightly: Nightly, state: State, night: date) -> list[Planned]:
    """What there is to do, in order."""
    dones = [(one, state.done(one.name)) for one in nightly.in_order]
    return [Planned(one, one.nights(night, done), one.left_out(night, done)) for one, done in dones]


def carry_out(
    planned: list[Planned],
    state: State,
    deadline: float | None,
    watch: Callable[[Dataset, date], AbstractContextManager[Show]],
    start_engine: Callable[[], Engine] | None = None,
) -> Iterator[Night]:
    """Score each dataset's nights, and say what became of each. A dataset that fails stops itself alone.

    `deadline`: seconds since the epoch. Raises Interrupted where whoever watches had a run drain.
    """
    with _SharedRay() as ray:
        for one in planned:
            state.begin(one.dataset.name, one.nights[0])
        for one in planned:
            if one.left_out is not None:
                yield Night(one.dataset, one.left_out[0], Outcome.LEFT_OUT, _missed(one))
            waiting_for: date | None = None
            for night in one.nights:
                state.check()
                if waiting_for is not None:
                    words = f"the night of {waiting_for} comes first, and isn't done"
                    yield Night(one.dataset, night, Outcome.NOT_BEGUN, words)
                    continue
                if _is_past(deadline):
                    told = Night(one.dataset, night, Outcome.NOT_BEGUN, "the deadline came before its turn")
                else:
                    told = _score(one.dataset, night, deadline, watch, start_engine, ray)
                if told.outcome in _DONE:
                    state.finish(one.dataset.name, night)
                    _prune(told)
                else:
                    waiting_for = night
                yield told
                if told.outcome is Outcome.INTERRUPTED:
                    raise Interrupted(told.message or "by hand")


def _missed(one: Planned) -> str:
    assert one.left_out is not None, "nights are left out"
    first, last = one.left_out
    return f"nights from {first} to {last} were missed, and catch_up allows {one.dataset.catch_up}. Give them by --date"


def _score(
    dataset: Dataset,
    night: date,
    deadline: float | None,
    watch: Callable[[Dataset, date], AbstractContextManager[Show]],
    start_engine: Callable[[], Engine] | None,
    ray: "_SharedRay",
) -> Night:
    began, told = time.time(), Night(dataset, night, Outcome.FAILED)
    try:
        with watch(dataset, night) as show:
            told.summary = batch.run(
                dataset.settings_for(night), _UntilDeadline(show, deadline), start_engine, ray.connected
            )
        told.outcome = Outcome.UNCHANGED if told.summary.is_repeat else Outcome.SCORED
    except InputMissing as error:
        told.message = str(error)
        told.outcome = Outcome.SKIPPED if dataset.missing == "skip" else Outcome.REFUSED
    except UsageError as error:
        told.outcome, told.message = Outcome.REFUSED, str(error)
    except TooManyErrors as error:
        told.outcome, told.message = Outcome.TOO_MANY_ERRORS, str(error)
        # What its replicas still work on would keep the next one's from their cores.
        ray.close()
    except Interrupted as error:
        told.outcome, told.message = Outcome.UNFINISHED if _is_past(deadline) else Outcome.INTERRUPTED, str(error)
    except (EngineUnusable, StorageFailed) as error:
        told.message = str(error)
        ray.close()
    except Exception as error:  # whatever it is, the next dataset may be better
        log.exception("%s, night of %s", dataset.name, night)
        told.message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        ray.close()
    told.seconds = time.time() - began
    return told


def _prune(told: Night) -> None:
    try:
        told.removed = retention.prune(Folder.at(told.dataset.run.output), told.dataset.keep)
    except (UsageError, StorageFailed) as error:
        # The night is done; the next one removes them.
        told.message = f"old runs weren't removed: {error}"


class _SharedRay:
    """One Ray for several runs: started for the first that needs one, and again after `close`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._is_up = False

    def __enter__(self) -> "_SharedRay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
        self._is_up = False

    @contextmanager
    def connected(self, verbose: bool) -> Iterator[None]:
        if not self._is_up:
            self._stack.enter_context(cluster.connected(verbose))
            self._is_up = True
        with cluster.connected(verbose):
            yield


class _UntilDeadline:
    """A Show that has a run drain when the deadline comes, and begin no engine after it."""

    def __init__(self, show: Show, deadline: float | None) -> None:
        self._show = show
        self._deadline = deadline
        self._draining: Event | None = None

    def phase(self, text: str) -> None:
        self._show.phase(text)

    def checked(self, num_rows: int) -> None:
        self._show.checked(num_rows)

    def progress(self, now: Progress) -> None:
        if _is_past(self._deadline) and self._draining is not None and not self._draining.is_set():
            self._show.phase("the deadline has come: finishing what is in the engines, and keeping it")
            self._draining.set()
        self._show.progress(now)

    @contextmanager
    def drains(self, draining: Event) -> Iterator[None]:
        if _is_past(self._deadline):
            raise Interrupted("the deadline came before an engine was started; the plan is kept")
        self._draining = draining
        with self._show.drains(draining):
            yield


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.time() >= deadline
