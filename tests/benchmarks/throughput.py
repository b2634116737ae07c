"""How much of a bare engine's speed a whole job keeps, and how much of it other ways to run a batch do.

All sides get the same requests, in interleaved rounds, each in a process of its own. The work, in two forms: prompts of
8 to 160 words and answers of 16 to 96 tokens (`sides/work.py`), ending by `max_tokens` alone (`ignore_eos`), so that
all sides generate as many tokens: completions, and chats in OpenAI's envelopes, since `vllm run-batch` takes no
completions.

- completions: ours, `overnight score`; vLLM's `LLM.generate`, tuned; `ray.data.llm`, tuned and default;
- chats: ours; `vllm run-batch`, tuned and default.

Default is what a peer does when it is told no more than what it needs to run at all: the size of its cache, and that
there is no GPU. Tuned is with all that we give ourselves (`sides/engine.py`). In generated tokens per second:

- generation: ours from the first submitted request to the last staged row; the call of `LLM.generate`; `vllm run-batch`
  from reading its file, when engine and handlers are up, to the written answers; `ray.data.llm` from the first
  request's arrival at its engine to the last row in the reader's hands;
- whole command: from the start of the process to its end, with the start of the engine, and in ours the checks, the
  plan and the published tables.

On a CPU without fast bf16 the defaults take hours for all requests: measure them apart, with `--skip-tuned --requests
24`.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides import Run, interleave, run_peer  # noqa: E402 - found below the root
from tests.benchmarks.sides.job import run_job  # noqa: E402 - found below the root
from tests.benchmarks.sides.work import as_chats, make_requests, write_lines  # noqa: E402 - found below the root

NUM_REQUESTS, NUM_QUICK = 384, 24
# A peer's name, module and setting, the form of its work, and what our generation is to be of its.
PEERS = (
    ("LLM.generate", "bare", "tuned", "completions", 0.97),
    ("ray.data.llm", "ray_data", "tuned", "completions", 1.2),
    ("vllm run-batch", "run_batch", "tuned", "chats", 1.0),
    ("ray.data.llm", "ray_data", "default", "completions", 2.4),
    ("vllm run-batch", "run_batch", "default", "chats", 2.3),
)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less work and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of all sides.")] = 2,
    requests: Annotated[int, typer.Option(help="How many requests.")] = NUM_REQUESTS,
    skip_default: Annotated[bool, typer.Option("--skip-default", help="Without peers as they come.")] = False,
    skip_tuned: Annotated[bool, typer.Option("--skip-tuned", help="Without tuned peers.")] = False,
) -> None:
    """Tokens per second of a whole job over those of vLLM, of its batch runner and of `ray.data.llm`."""
    is_skipped = {"default": skip_default, "tuned": skip_tuned}
    peers = [peer for peer in PEERS if not is_skipped[peer[2]]]
    completions = make_requests(NUM_QUICK if quick else requests)
    with tempfile.TemporaryDirectory() as scratch:
        files = {
            "completions": write_lines(Path(scratch) / "completions.jsonl", completions),
            "chats": write_lines(Path(scratch) / "chats.jsonl", as_chats(completions)),
        }
        sides: dict[str, Callable[[], Run]] = {}
        for name, module, setting, form, _ in peers:
            sides[f"job, {form}"] = lambda path=files[form]: run_job(path)[0]
            sides[f"{name}, {setting}"] = partial(run_peer, module, setting, files[form])
        runs = interleave(sides, 1 if quick else rounds)
    assert len({run.num_tokens for done in runs.values() for run in done}) == 1
    figures = []
    for name, _, setting, form, aim in peers:
        figures += [
            Figure(
                f"{phase}, {form}: job / {name}, {setting}",
                [run.num_tokens / getattr(run, field) for run in runs[f"job, {form}"]],
                [run.num_tokens / getattr(run, field) for run in runs[f"{name}, {setting}"]],
                aim if field == "generation_s" else None,
                "tokens/s",
            )
            for phase, field in (("generation", "generation_s"), ("whole command", "whole_s"))
        ]
    report(figures, json_file)


if __name__ == "__main__":
    typer.run(main)
