"""vLLM's `LLM.generate` by itself, for benchmarks: the same work under settings of ours or of vLLM's.

Work: mixed lengths, ending by `max_tokens` alone (`ignore_eos`), so that all sides generate the same tokens. Run as a
script it is one side in a process of its own, and prints its generated tokens per second.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

WORDS = "the river wind stone letter garden night bread paper market winter door road voice light water"

# Ours; ours without libraries loaded before all others; vLLM's; vLLM's in the number type that suits the machine.
Side = Literal["ours", "no-preload", "default", "default-dtype"]


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


def write_requests(path: Path, number: int) -> None:
    path.write_text("".join(json.dumps(body) + "\n" for body in make_requests(number)))


def measure(side: Side, requests: Path) -> float:
    """Generated tokens per second of a bare engine: the generation phase alone."""
    done = subprocess.run(
        [sys.executable, __file__, side, requests], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.splitlines()[-1])


def engine_arguments(side: Side) -> dict:
    """Arguments of vLLM's engine for a side; sets the environment that goes with them."""
    from pipelines import machine
    from pipelines.limits import read_limits
    from pipelines.model import resolve
    from schemas.settings import EngineSettings

    settings = EngineSettings()
    limits = read_limits(resolve(None), (), settings)
    chosen = {choice.name: choice.value for choice in machine.cpu_arguments(settings, 1, limits)}
    if side in {"default", "default-dtype"}:
        # Its share of all memory is more than is free on a machine that does anything else.
        given = {"kv_cache_memory_bytes": chosen["kv_cache_memory_bytes"]}
        return given if side == "default" else {**given, "dtype": chosen["dtype"]}
    environment = machine.cpu_environment(list(range(machine.count_cores())), 1)
    if side == "no-preload":
        environment.pop("LD_PRELOAD", None)
    os.environ.update(environment)
    return chosen


def run(side: Side, requests: Path) -> float:
    """One side, in this process."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from pipelines.model import resolve

    arguments = engine_arguments(side)
    from vllm import LLM, SamplingParams

    llm = LLM(resolve(None).path, disable_log_stats=True, **arguments)
    bodies = [json.loads(line) for line in requests.read_text().splitlines()]
    parameters = [
        SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True, output_kind=2) for body in bodies
    ]
    started = time.perf_counter()
    outputs = llm.generate([body["prompt"] for body in bodies], parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


if __name__ == "__main__":
    print(run(sys.argv[1], Path(sys.argv[2])))
