"""What the program itself logs, in each of a run's processes: for a person who asked, or as JSON for machines."""

import logging
import os
from collections.abc import Mapping

# By Ray's own word for it, all processes of a run log as objects, a line each.
_ENCODING = "RAY_LOGGING_CONFIG_ENCODING"
_VERBOSE = "OVERNIGHT_VERBOSE"


def structure() -> None:
    """Have this process and those of its Ray log JSON, an object a line. To be called before Ray is imported."""
    os.environ[_ENCODING] = "JSON"


def is_structured() -> bool:
    return os.environ.get(_ENCODING) == "JSON"


def environment(verbose: bool) -> Mapping[str, str]:
    """Variables by which a process of the run knows what to show."""
    return {_VERBOSE: "1"} if verbose else {}


def show_if_asked() -> None:
    """Let this process tell on stderr what it chooses and why, where its `environment` says so."""
    if os.environ.get(_VERBOSE):
        show()


def show() -> None:
    """Let this process tell on stderr what it chooses and why. As JSON, Ray's own configuration does it."""
    ours = logging.getLogger("overnight")
    if is_structured() or ours.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
