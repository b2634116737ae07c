"""The sides of the benchmarks: each is one way to answer the same requests, as a command in a process of its own.

`job` is ours. The others are peers, with settings of their own or with those that we give ourselves; see `engine.py`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.sides.engine import Setting

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@dataclass(frozen=True)
class Run:
    """What one side did: answered rows, generated tokens, and how long that took."""

    num_rows: int
    num_tokens: int
    # From the first request that goes to the engine to the last answer that is written or handed on.
    generation_s: float
    # The whole command, from the start of its process to its end.
    whole_s: float


def interleave(sides: Mapping[str, Callable[[], Run]], num_rounds: int) -> dict[str, list[Run]]:
    """What each side did in each round; every second round goes backwards. Says what it has, run by run."""
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for turn in range(num_rounds):
        for name in sides if turn % 2 == 0 else reversed(list(sides)):
            run = sides[name]()
            runs[name].append(run)
            speeds = f"{run.num_rows / run.generation_s:.3f} rows/s, {run.num_tokens / run.generation_s:.1f} tokens/s"
            print(f"{name}: {speeds} over {run.generation_s:.1f} s of {run.whole_s:.1f} s", file=sys.stderr, flush=True)
    return runs


def run_peer(name: str, setting: Setting, requests: Path, **engine: object) -> Run:
    """A peer's module of this package as a command, whose last line is what it did.

    `engine`: settings of ours that hold with every setting.
    """
    module = f"{__name__}.{name}"
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0"}
    output, whole_s = run_command([sys.executable, "-m", module, setting, requests, json.dumps(engine)], environment)
    return Run(**json.loads(output.splitlines()[-1]), whole_s=whole_s)


def run_command(command: list[str | Path], environment: dict[str, str] | None = None) -> tuple[str, float]:
    """A command's output and its seconds; what it says on standard error shows when it fails."""
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout, time.perf_counter() - started
