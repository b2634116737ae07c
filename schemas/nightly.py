"""What `overnight nightly` is told: datasets with a path for each night, and what binds the night itself."""

from datetime import date, datetime, time, timedelta, tzinfo
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from schemas.settings import RunSettings, Settings
from schemas.templates import has_date, render


class Keep(Settings):
    """Which published runs are kept beside the current one: what either of these keeps. Without any, all."""

    runs: int | None = Field(None, ge=1, description="The newest so many.")
    days: int | None = Field(None, ge=1, description="Those of the last so many days.")


class Dataset(Settings):
    """One dataset of every night."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]{0,63}$")
    # Its inputs are templates.
    run: RunSettings
    allow_errors: bool = False
    # Whether each night's run has its page.
    has_report: bool = True
    # Lower is earlier; equal ones go in the order of the file.
    priority: int = 0
    # Nights before this one that weren't done, and are to be, at most.
    catch_up: int = Field(7, ge=0, le=366)
    keep: Keep = Keep()
    # What a night without an input is: a failure, which is tried again, or done.
    missing: Literal["fail", "skip"] = "fail"

    @model_validator(mode="after")
    def _has_good_paths(self) -> "Dataset":
        for template in self.run.inputs:
            render(template, date(2000, 1, 1))
        if "{date" in self.run.output or "{yesterday" in self.run.output:
            raise ValueError(
                f"{self.run.output}: found a date in the output, expected one folder for all nights: a night is "
                "compared there with the one before"
            )
        return self

    @property
    def is_dated(self) -> bool:
        """Whether its input is another one each night."""
        return any(map(has_date, self.run.inputs))

    def settings_for(self, night: date) -> RunSettings:
        """The run of a night: a new one that takes over the answers of the one before."""
        inputs = tuple(render(template, night) for template in self.run.inputs)
        labels = {"dataset": self.name, "night": night.isoformat()}
        return self.run.model_copy(update={"inputs": inputs, "labels": labels, "changed": True})

    def nights(self, night: date, done: date | None) -> list[date]:
        """The nights that are to be done, in order: those since `done` as far as they are caught up, and `night`."""
        if not self.is_dated or done is None or done >= night:
            return [night]
        first = max(done + timedelta(days=1), night - timedelta(days=self.catch_up))
        return [first + timedelta(days=n) for n in range((night - first).days + 1)]

    def left_out(self, night: date, done: date | None) -> tuple[date, date] | None:
        """The first and the last of the nights that were missed and aren't caught up, where there are any."""
        first = self.nights(night, done)[0]
        if not self.is_dated or done is None or first - done <= timedelta(days=1):
            return None
        return done + timedelta(days=1), first - timedelta(days=1)


class Nightly(Settings):
    """All that is done every night."""

    # Folder or URI: which nights are done, what the last one came to, and who is at it.
    state: Annotated[str, Field(min_length=1)]
    # The machine's own, where it is None.
    time_zone: str | None = None
    # Past it no dataset begins, and the one under way is drained.
    deadline: time | None = None
    datasets: Annotated[tuple[Dataset, ...], Field(min_length=1)]

    @field_validator("deadline", mode="before")
    @classmethod
    def _as_time(cls, value: Any) -> Any:
        # YAML takes 22:00, unquoted, for a number to the base of 60; a smaller one is no time that somebody wrote so.
        if isinstance(value, int) and not isinstance(value, bool) and 60 <= value < 24 * 60:
            return time(*divmod(value, 60))
        if not isinstance(value, str) or len(value) not in (5, 8):
            raise ValueError("expected a time of day, such as 06:00")
        return value

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                ZoneInfo(name)
            except (ZoneInfoNotFoundError, ValueError, OSError):
                raise ValueError(
                    "expected the name of a time zone, such as Europe/Berlin. Where it is right, install tzdata"
                ) from None
        return name

    @model_validator(mode="after")
    def _are_apart(self) -> "Nightly":
        for words, values in (
            ("name", [one.name for one in self.datasets]),
            ("output", [one.run.output.rstrip("/") for one in self.datasets]),
        ):
            twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
            if twice is not None:
                raise ValueError(f"{words} {twice}: found twice. Give each dataset one of its own")
        if self.state.rstrip("/") in [one.run.output.rstrip("/") for one in self.datasets]:
            raise ValueError(f"state {self.state}: is the output of a dataset, too. Give it a folder of its own")
        return self

    @property
    def zone(self) -> tzinfo | None:
        return ZoneInfo(self.time_zone) if self.time_zone is not None else None

    @property
    def in_order(self) -> list[Dataset]:
        return sorted(self.datasets, key=lambda one: one.priority)

    def next_deadline(self, now: float) -> float | None:
        """The first one after `now`; both in seconds since the epoch."""
        if self.deadline is None:
            return None
        today = datetime.fromtimestamp(now, self.zone).date()
        moments = (
            datetime.combine(today + timedelta(days=days), self.deadline, self.zone).timestamp() for days in (0, 1, 2)
        )
        return next(moment for moment in moments if moment > now)
