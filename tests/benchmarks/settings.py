"""What the settings that we choose for this machine gain over vLLM's defaults.

The same `LLM.generate` over the same requests (see `tests/benchmarks/sides/`) on every side, each in a process of its
own, in interleaved rounds:

- ours: threads bound to all cores, small cache blocks, wide steps, the number type that the CPU computes fast, eager
  mode, and with or without the allocator and OpenMP libraries loaded before all others;
- peer: vLLM's defaults; in a figure of its own also with the number type that we choose.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated, get_args

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides import run_peer  # noqa: E402 - found below the root
from tests.benchmarks.sides.engine import Setting  # noqa: E402 - found below the root
from tests.benchmarks.sides.work import make_requests, write_lines  # noqa: E402 - found below the root

NUM_REQUESTS, NUM_QUICK = 96, 32


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less work and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of all sides.")] = 2,
) -> None:
    """Tokens per second with our engine settings over those with vLLM's defaults."""
    told: dict[Setting, list[float]] = {side: [] for side in get_args(Setting)}
    with tempfile.TemporaryDirectory() as scratch:
        requests = write_lines(Path(scratch) / "requests.jsonl", make_requests(NUM_QUICK if quick else NUM_REQUESTS))
        for turn in range(1 if quick else rounds):
            for side in told if turn % 2 == 0 else reversed(list(told)):
                run = run_peer("bare", side, requests)
                told[side].append(run.num_tokens / run.generation_s)
    report(
        [
            Figure("settings, preloaded / vLLM's defaults", told["tuned"], told["default"], 2.3, "tokens/s"),
            Figure("settings / vLLM's defaults", told["no-preload"], told["default"], 2.1, "tokens/s"),
            Figure("preloaded / defaults in our number type", told["tuned"], told["default-dtype"], None, "tokens/s"),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
