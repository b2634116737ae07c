"""How much of a bare engine's speed a whole job keeps.

Both sides get the same requests and the same engine settings, in interleaved rounds, each in a process of its own:

- ours: `overnight score`: its engine time, from the first submitted request to the last staged row;
- peer: `LLM.generate` of vLLM over the same prompts, all given at once: the generation phase alone.

Work: mixed lengths, ending by `max_tokens` alone (`ignore_eos`), so that both sides generate the same tokens.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root

WORDS = "the river wind stone letter garden night bread paper market winter door road voice light water"
NUM_REQUESTS, NUM_QUICK = 384, 48


def make_requests(number: int) -> list[dict]:
    """Prompts of 8 to 160 words, answers of 16 to 96 tokens; the same for the same number."""
    draw = random.Random(number)  # noqa: S311 - work to repeat, not a secret
    return [
        {
            "prompt": f"{index}: " + " ".join(draw.choices(WORDS.split(), k=draw.randint(8, 160))),
            "max_tokens": draw.randint(16, 96),
            "ignore_eos": True,
            "temperature": 0,
        }
        for index in range(number)
    ]


def measure_ours(requests: Path, folder: Path) -> float:
    """Generated tokens per second of a whole job."""
    command = [sys.executable, "jobs/score.py", "--input", requests, "--output", folder / "out"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    assert manifest["rows"]["errors"] == 0
    return manifest["usage"]["completion_tokens"] / manifest["timings_s"]["infer"]


def measure_peer(requests: Path) -> float:
    """Generated tokens per second of a bare engine."""
    command = [sys.executable, __file__, "--peer", requests]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def run_peer(requests: Path) -> None:
    """The peer's process: the settings that our engine takes on this machine, given to vLLM's own LLM."""
    import os
    import time

    from pipelines import machine
    from pipelines.model import resolve
    from schemas.settings import EngineSettings

    os.environ.update(machine.cpu_environment(list(range(machine.count_cores())), 1))
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    arguments = {choice.name: choice.value for choice in machine.cpu_arguments(EngineSettings(), 1)}
    llm = LLM(resolve(None).path, enable_prefix_caching=True, disable_log_stats=True, **arguments)
    bodies = [json.loads(line) for line in requests.read_text().splitlines()]
    parameters = [
        SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True, output_kind=2) for body in bodies
    ]
    started = time.perf_counter()
    outputs = llm.generate([body["prompt"] for body in bodies], parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    print(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less work and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of both sides.")] = 2,
    peer: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Tokens per second of a whole job over those of a bare `LLM.generate`."""
    if peer is not None:
        run_peer(peer)
        return
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        requests = Path(scratch) / "requests.jsonl"
        bodies = make_requests(NUM_QUICK if quick else NUM_REQUESTS)
        requests.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        for number in range(1 if quick else rounds):
            folder = Path(scratch) / str(number)
            sides = [
                lambda: theirs.append(measure_peer(requests)),
                lambda f=folder: ours.append(measure_ours(requests, f)),
            ]
            for side in sides if number % 2 == 0 else reversed(sides):
                side()
    report([Figure("throughput: job / bare LLM.generate", ours, theirs, aim=0.97, unit="tokens/s")], json_file)


if __name__ == "__main__":
    typer.run(main)
