"""Exit statuses, the same for every verb."""

from collections.abc import Iterable
from enum import IntEnum


class ExitStatus(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    ROW_ERRORS = 3
    TOO_MANY_ERRORS = 4
    UNFINISHED = 5
    BUSY = 6
    INTERRUPTED = 130
    TERMINATED = 143


# From the best to the worst: of several, the last one is told.
_BY_WEIGHT = [
    ExitStatus.OK,
    ExitStatus.ROW_ERRORS,
    ExitStatus.UNFINISHED,
    ExitStatus.BUSY,
    ExitStatus.TOO_MANY_ERRORS,
    ExitStatus.USAGE,
    ExitStatus.FAILED,
    ExitStatus.INTERRUPTED,
    ExitStatus.TERMINATED,
]


def worst(statuses: Iterable[int]) -> ExitStatus:
    """The one that a job of several parts ends with; 0 without any."""
    return max(map(ExitStatus, statuses), key=_BY_WEIGHT.index, default=ExitStatus.OK)
