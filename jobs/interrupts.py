"""SIGTERM as an exception, so that what is open is closed."""

import signal
from typing import Any, NoReturn


class Terminated(BaseException):
    """SIGTERM came. Not an Exception, so that nothing on the way takes it for a fault of its own."""


def catch_sigterm() -> None:
    """From now on SIGTERM raises Terminated in the main thread."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(*_: Any) -> NoReturn:
    raise Terminated
