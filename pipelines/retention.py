"""Retention: published runs that are old enough go; the current one, and one under way, never do."""

import re
import time
from datetime import UTC, datetime

from pipelines import runs, write
from pipelines.lease import Lease
from pipelines.storage import Folder
from schemas.nightly import Keep

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


def prune(output: Folder, keep: Keep) -> list[str]:
    """Remove the published runs of a folder that `keep` doesn't keep; their ids. Raises Busy where a run is under
    way."""
    if keep.runs is None and keep.days is None:
        return []
    with Lease(output):
        current, unfinished = write.read_manifest(output), runs.find_unfinished(output)
        spared = {current["run_id"] if current else "", unfinished.run_id if unfinished else ""}
        old = [run_id for run_id in too_old(output.join("runs").names(), keep, time.time()) if run_id not in spared]
        for run_id in old:
            folder = output.join("runs", run_id)
            # First what says that it is whole.
            folder.remove_file("_SUCCESS")
            folder.remove()
    return old


def too_old(run_ids: list[str], keep: Keep, now: float) -> list[str]:
    """Of the ids of runs, which begin with their time, those that neither the number nor the days keep; oldest first.
    What isn't the id of a run is none of ours. `now`: seconds since the epoch."""
    ours = sorted(run_id for run_id in run_ids if _RUN_ID.fullmatch(run_id))
    kept = set(ours[-keep.runs :] if keep.runs is not None else ())
    if keep.days is not None:
        first = f"{datetime.fromtimestamp(now - keep.days * 86400, UTC):%Y%m%dT%H%M%SZ}"
        kept |= {run_id for run_id in ours if run_id >= first}
    return [run_id for run_id in ours if run_id not in kept]
