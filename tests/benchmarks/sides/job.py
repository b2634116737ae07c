"""Ours: `overnight score`. Its generation is from the first submitted request to the last staged row."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.sides import Run, run_command


def run_job(requests: Path, **engine: object) -> tuple[Run, dict[str, Any]]:
    """What a job did with a file of requests, and its manifest. `engine`: settings of its engine."""
    settings = [option for name, value in engine.items() for option in ("--engine", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "out"
        command = [sys.executable, "jobs/score.py", "--input", requests, "--output", output, *settings]
        _, whole_s = run_command(command)
        manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["rows"]["errors"] == 0
    return Run(
        num_rows=manifest["rows"]["responses"],
        num_tokens=manifest["usage"]["completion_tokens"],
        generation_s=manifest["timings_s"]["infer"],
        whole_s=whole_s,
    ), manifest
