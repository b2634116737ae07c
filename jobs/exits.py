"""Exit statuses, the same for every verb."""

from enum import IntEnum


class ExitStatus(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    ROW_ERRORS = 3
    TOO_MANY_ERRORS = 4
    INTERRUPTED = 130
    TERMINATED = 143
