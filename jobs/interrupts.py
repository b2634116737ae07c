"""How every verb ends when it doesn't come to its end: one line, and a status of its own."""

import signal
from collections.abc import Callable
from typing import Any, NoReturn

from jobs.exits import ExitStatus
from jobs.options import say
from schemas.failures import UsageError


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, so that nothing on the way takes it for a fault of its own."""


def carry_out(work: Callable[[], int], left: str = "") -> int:
    """The status of `work`; or that of a UsageError, Ctrl-C or SIGTERM, told in one line that ends with `left`."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return work()
    except UsageError as error:
        return say(str(error), ExitStatus.USAGE)
    except KeyboardInterrupt:
        return say(f"interrupted{left}", ExitStatus.INTERRUPTED)
    except Terminated:
        return say(f"terminated{left}", ExitStatus.TERMINATED)


def _terminate(*_: Any) -> NoReturn:
    raise Terminated
