"""What the plan's order and the answering of equal requests once are worth where prompts share beginnings.

Work (`sides/work.py`): 512 completions over 32 prefixes of 400 to 600 tokens, with tails of 8 to 32 words and answers
of 8 to 32 tokens, shuffled; a fifth of them are exact repetitions of others, at temperature 0. The cache has room for
half of the prefixes' tokens. Both sides get the same engine settings and the same bytes of cache, in interleaved
rounds, each in a process of its own:

- ours: `overnight score`;
- peer: `ray.data.llm`, tuned; see `sides/`.

Rows are all requests, repeated ones too. Their generation is timed without the start of the engine: ours from the first
submitted request to the last staged row, the peer's from the first request's arrival at its engine to the last row in
the reader's hands. Whole command is from the start of the process to its end.

Tokens found in the prefix cache are compared with those that could be at most, each block of the tree of all different
prompts being computed once; `count_shareable` counts them from the prompts' tokens, the plan for itself.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides import Run, interleave, run_peer  # noqa: E402 - found below the root
from tests.benchmarks.sides.job import run_job  # noqa: E402 - found below the root
from tests.benchmarks.sides.work import count_shareable, make_shared_prefixes, write_lines  # noqa: E402

NUM_REQUESTS, NUM_QUICK = 512, 64
# Of the prefixes' tokens, what the cache holds.
CACHED_SHARE = 0.5
# No request is longer; a cache must have room for one that is.
MAX_MODEL_LEN = 1024


def cache_bytes(num_tokens: int, model: str, *, is_float32: bool) -> int:
    """Keys and values of so many tokens, over all layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * (4 if is_float32 else 2) * num_tokens


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="64 requests over 8 prefixes, and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of both sides.")] = 2,
    requests: Annotated[int, typer.Option(help="How many requests.")] = NUM_REQUESTS,
    prefixes: Annotated[int, typer.Option(help="How many prefixes.")] = 32,
) -> None:
    """Rows a second of a job over those of `ray.data.llm`, and cached tokens over those that could be."""
    from transformers import AutoTokenizer

    from pipelines.machine import has_fast_bf16
    from pipelines.model import resolve

    work = make_shared_prefixes(*((NUM_QUICK, 8) if quick else (requests, prefixes)))
    model = resolve(None).path
    tokenizer = AutoTokenizer.from_pretrained(model)
    shareable = count_shareable(tokenizer(work.prompts)["input_ids"])
    num_kept = int(CACHED_SHARE * sum(map(len, tokenizer(work.prefixes)["input_ids"])))
    num_bytes = cache_bytes(num_kept, model, is_float32=not has_fast_bf16())
    settings: dict[str, Any] = {"kv_cache_gib": num_bytes / 2**30, "max_model_len": MAX_MODEL_LEN}
    plans: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        path = write_lines(Path(scratch) / "requests.jsonl", work.requests)

        def run_ours() -> Run:
            run, manifest = run_job(path, **settings)
            plans.append(manifest["plan"])
            return run

        sides: dict[str, Callable[[], Run]] = {
            "job": run_ours,
            "ray.data.llm, tuned": lambda: run_peer("ray_data", "tuned", path, **settings),
        }
        ours, theirs = interleave(sides, 1 if quick else rounds).values()

    def rates(runs: list[Run], field: str) -> list[float]:
        return [run.num_rows / getattr(run, field) for run in runs]

    def tokens(name: str) -> list[float]:
        return [float(plan[name]) for plan in plans]

    report(
        [
            Figure(
                "generation: job / ray.data.llm, tuned",
                rates(ours, "generation_s"),
                rates(theirs, "generation_s"),
                2.5,
                "rows/s",
            ),
            Figure(
                "whole command: job / ray.data.llm, tuned",
                rates(ours, "whole_s"),
                rates(theirs, "whole_s"),
                None,
                "rows/s",
            ),
            Figure(
                "found in the prefix cache / most that could be",
                tokens("cached_tokens"),
                tokens("shared_tokens"),
                0.97,
                "tokens",
            ),
            Figure(
                "most that could be: the plan / counted apart",
                tokens("shared_tokens"),
                [float(shareable)] * len(plans),
                1,
                "tokens",
            ),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
