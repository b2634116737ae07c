"""How much of a bare engine's speed a whole job keeps.

Both sides get the same requests and the same engine settings, in interleaved rounds, each in a process of its own:

- ours: `overnight score`: its engine time, from the first submitted request to the last staged row;
- peer: `LLM.generate` of vLLM over the same prompts, all given at once: the generation phase alone.

Work: mixed lengths, ending by `max_tokens` alone (`ignore_eos`), so that both sides generate the same tokens.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks import bare  # noqa: E402 - found below the root
from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root

NUM_REQUESTS, NUM_QUICK = 384, 48


def measure_ours(requests: Path, folder: Path) -> float:
    """Generated tokens per second of a whole job."""
    command = [sys.executable, "jobs/score.py", "--input", requests, "--output", folder / "out"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert manifest["rows"]["errors"] == 0
    return manifest["usage"]["completion_tokens"] / manifest["timings_s"]["infer"]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less work and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of both sides.")] = 2,
) -> None:
    """Tokens per second of a whole job over those of a bare `LLM.generate`."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        requests = Path(scratch) / "requests.jsonl"
        bare.write_requests(requests, NUM_QUICK if quick else NUM_REQUESTS)
        for number in range(1 if quick else rounds):
            folder = Path(scratch) / str(number)
            sides = [
                lambda: theirs.append(bare.measure("ours", requests)),
                lambda f=folder: ours.append(measure_ours(requests, f)),
            ]
            for side in sides if number % 2 == 0 else reversed(sides):
                side()
    report([Figure("throughput: job / bare LLM.generate", ours, theirs, aim=0.97, unit="tokens/s")], json_file)


if __name__ == "__main__":
    typer.run(main)
