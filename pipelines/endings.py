"""How the last command into an output folder ended: `summary.json`, written in every case that has a place for it."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from pipelines.progress import read_status
from pipelines.storage import Folder
from pipelines.write import foreign_names, read_manifest
from schemas.failures import Busy, UsageError

log = logging.getLogger("overnight.endings")

# What stands in it of a manifest.
_TOLD = ("run_id", "rows", "errors_by_reason", "usage", "cost", "timings_s", "late_s")


def write_end(output: str, error: BaseException | None, status: int, words: str | None) -> None:
    """Write down how a command ended: its exit status, what is said of it, and how far its run is.

    Not into a folder that isn't a run's, nor beside another command that is at work there. Raises nothing.
    """
    try:
        folder = Folder.at(output)
        if not output or isinstance(error, Busy) or foreign_names(folder):
            return
        told: dict[str, Any] = {
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "exit_status": int(status),
            "error": words,
            "run": None,
        }
        # What was refused has left no trace of its own.
        if error is None:
            manifest = read_manifest(folder) or {}
            told["run"] = {name: manifest[name] for name in _TOLD if name in manifest}
        elif not isinstance(error, UsageError):
            told["run"] = read_status(folder)
        folder.write((json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode(), "summary.json")
    except Exception:  # the exit status tells it, too
        log.debug("summary.json wasn't written", exc_info=True)
