"""No engine outlives whoever started it. vLLM's processes look for that only once an engine is up; one that is still
loading when its starter is killed would hold its memory and its cores for ever.

vLLM calls `end_with_parent` at the beginning of each of its processes: it is a plugin, by its entry in pyproject.toml.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

# Holds the id of the process that starts an engine; without it vLLM isn't ours.
STARTER = "OVERNIGHT_ENGINE_STARTER"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the system kill this process when its parent dies. Does nothing outside of an engine's own processes."""
    starter = os.environ.get(STARTER)
    if starter is None or starter == str(os.getpid()) or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        # It died before.
        os._exit(1)
