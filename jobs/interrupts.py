"""How every verb ends when it doesn't come to its end: one line, and a status of its own."""

import signal
from collections.abc import Callable
from typing import Any, NoReturn

from jobs.exits import ExitStatus
from jobs.options import say
from schemas.failures import EngineUnusable, Interrupted, JobLost, StorageFailed, TooManyErrors, UsageError

# Told how a verb ended: what ended it, None where it came to its end; its status; the line that is said of it.
End = Callable[[BaseException | None, int, str | None], None]


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, so that nothing on the way takes it for a fault of its own."""


def carry_out(work: Callable[[], int], left: str = "", end: End = lambda *_: None) -> int:
    """The status of `work`; or that of what ends it, told in one line that ends with `left`: a UsageError, an engine or
    a store that fails, a job that is lost, too many rows that failed, Ctrl-C or SIGTERM. A fault of ours is raised on.

    `end` is called in each case.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = work()
    except BaseException as error:
        told = _tell(error, left)
        if told is None:
            end(error, ExitStatus.FAILED, " ".join(f"{type(error).__name__}: {error}".split()))
            raise
        status, words = told
        say(words, status)
        end(error, status, words)
    else:
        end(None, status, None)
    return status


def _tell(error: BaseException, left: str) -> tuple[int, str] | None:
    """The status and the words for what ended a verb; None for a fault of ours."""
    told: tuple[int, str] | None = None
    match error:
        case UsageError():
            told = ExitStatus.USAGE, str(error)
        case EngineUnusable():
            told = ExitStatus.FAILED, f"{error.reason}. Run again with --verbose to see the engine's own log"
        case StorageFailed() | JobLost():
            told = ExitStatus.FAILED, f"{error}{left}"
        case TooManyErrors():
            told = ExitStatus.TOO_MANY_ERRORS, f"{error}; what is finished is kept"
        case Interrupted():
            told = ExitStatus.INTERRUPTED, f"interrupted: {error}{left}"
        case KeyboardInterrupt():
            told = ExitStatus.INTERRUPTED, f"interrupted{left}"
        case Terminated():
            told = ExitStatus.TERMINATED, f"terminated{left}"
    return told


def _terminate(*_: Any) -> NoReturn:
    raise Terminated
