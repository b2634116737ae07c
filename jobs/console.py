"""What a person sees of a run while it goes on: a bar on a terminal, lines elsewhere."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipelines.logs import is_structured
from pipelines.progress import Progress as RunProgress

log = logging.getLogger("overnight.console")

LINE_EVERY_S = 5.0
# The age of the oldest request in flight is told from here on.
OLD_S = 30.0
# A stall that lasts is told so often.
STALL_EVERY_S = 60.0


class RunView:
    """Shows a run on standard error, so that standard output holds the summary alone. Where logs are structured, the
    run itself logs how far it is, and this only what it doesn't know."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._is_structured = is_structured()
        self._is_live = self.console.is_terminal and not self._is_structured
        self._has_lines = not self._is_live and not self._is_structured
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("starting", total=None, detail="")
        self._is_answering = False
        self._last_line = 0.0
        self._last_stall = -STALL_EVERY_S

    def __enter__(self) -> "RunView":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=text, total=None, detail="")
        if self._has_lines:
            self._line(text)

    def checked(self, num_rows: int) -> None:
        self._bar.update(self._task, detail=f"{num_rows:,} lines")
        if self._has_lines and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._line(f"{num_rows:,} lines checked")

    def progress(self, now: RunProgress) -> None:
        if not now.num_replicas_up:
            return
        self._is_answering = True
        detail = describe(now)
        self._bar.update(
            self._task,
            description="answering",
            total=now.total_rows,
            completed=now.done.num_done,
            detail=detail,
        )
        if now.stalled and time.monotonic() - self._last_stall >= STALL_EVERY_S:
            self._last_stall = time.monotonic()
            waiting = ", ".join(f"{row} ({clock(age)})" for row, age in now.stalled)
            self._line(f"stalled: a replica finishes nothing any more; longest in it are {waiting}")
        if self._has_lines and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._line(f"{now.done.num_done:,} of {now.total_rows:,} rows, {detail}")

    @contextmanager
    def drains(self, draining: threading.Event) -> Iterator[None]:
        """For the block, the first Ctrl-C asks to drain, once an engine is up; the next one stops at once. Where it is
        ignored, it stays so."""

        def interrupt(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            if not self._is_answering:
                raise KeyboardInterrupt
            draining.set()
            self._line("finishing what is in the engines, and keeping it; Ctrl-C again stops at once")

        before = signal.getsignal(signal.SIGINT)
        if before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._is_structured:
            log.warning(text)
            return
        if self._is_live:
            self.console.print(text)
            return
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: T201 - a line of a log


def describe(now: RunProgress) -> str:
    """`3 failed, 128 in flight, 512 tokens/s, 0:42 left`"""
    words = [
        f"{now.done.num_failed:,} failed" if now.done.num_failed else "",
        f"{now.num_in_flight:,} in flight",
        f"{now.tokens_per_s:,.0f} tokens/s",
        f"{clock(now.remaining_s)} left" if now.remaining_s is not None else "",
        late(now.late_s),
        f"oldest {clock(now.oldest[0][1])}" if now.oldest and now.oldest[0][1] >= OLD_S else "",
    ]
    return ", ".join(word for word in words if word)


def late(seconds: float | None) -> str:
    """Whether a run will be done when it must: `in time by 0:42`, `late by 12:00`; "" where that isn't known."""
    if seconds is None:
        return ""
    return f"late by {clock(seconds)}" if seconds > 0 else f"in time by {clock(-seconds)}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
