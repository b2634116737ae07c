"""What a beam search costs here, and what in vLLM.

Work: chats that end by themselves after a sentence, four beams each, `max_tokens` 64, all given at once. Three sides,
each in a process of its own, in interleaved rounds; measured is the wall time from the first request to the last
answer, without the start of the engine:

- ours: our beam search behind the engine's seam, with the settings that we choose for this machine;
- same settings: `LLM.beam_search` of vLLM with those settings;
- default: `LLM.beam_search` of vLLM with its own settings.

Also our rate of answer tokens beside that of sampling the same prompts with `n=4` in the same engine, and how many of
the answers are the same, in the same order, as vLLM's with the same settings. The two searches define a step alike;
vLLM's offline one also stops at nothing but the tokenizer's end token.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root
from tests.benchmarks.sides.engine import engine_arguments  # noqa: E402 - found below the root

LANDS = (
    *("France", "Italy", "Spain", "Germany", "Japan", "China", "India", "Brazil"),
    *("Peru", "Chile", "Egypt", "Kenya", "Norway", "Sweden", "Poland", "Greece"),
)
WIDTH, MAX_TOKENS = 4, 64


def make_prompts(number: int) -> list[list[int]]:
    """Token ids of so many chats."""
    from transformers import AutoTokenizer

    from pipelines.model import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(None).path)
    chats = [
        [{"role": "user", "content": f"What is the capital of {land}? Answer in one short sentence."}]
        for land in LANDS[:number]
    ]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in chats
    ]


def run_ours(number: int) -> dict:
    """Seconds of our beams, and of sampling as many choices; the beams' answers."""
    from pipelines.model import resolve
    from pipelines.vllm_engine import VllmEngine
    from schemas.requests import Request
    from schemas.settings import EngineSettings

    engine = VllmEngine.start(resolve(None), (), EngineSettings())

    def answer(**fields: object) -> tuple[float, list[dict]]:
        bodies = [
            {"prompt": prompt, "n": WIDTH, "max_tokens": MAX_TOKENS, "return_token_ids": True, **fields}
            for prompt in make_prompts(number)
        ]
        started = time.perf_counter()
        sent = [engine.submit(Request("b", "/v1/completions", json.dumps(body)), lane="batch") for body in bodies]
        answers = [future.result().body for future in sent]
        return time.perf_counter() - started, answers

    # Both find the prompts' first tokens in the cache, as vLLM's beams do from their second step.
    sampling_s, sampled = answer(temperature=1.0, seed=1)
    seconds, found = answer(use_beam_search=True)
    engine.close()

    def num_tokens(answers: list[dict]) -> int:
        return sum(body["usage"]["completion_tokens"] for body in answers)

    return {
        "seconds": seconds,
        "answers": [[choice["token_ids"] for choice in body["choices"]] for body in found],
        "search_tokens": sum(body["usage"]["search_tokens"] for body in found),
        "tokens_per_s": num_tokens(found) / seconds,
        "sampled_per_s": num_tokens(sampled) / sampling_s,
    }


def run_vllm(number: int, *, same_settings: bool) -> dict:
    """Seconds of vLLM's own beam search, and its answers."""
    from pipelines.model import resolve

    arguments = engine_arguments("tuned" if same_settings else "default")
    from vllm import LLM
    from vllm.sampling_params import BeamSearchParams

    llm = LLM(resolve(None).path, disable_log_stats=True, **arguments)
    prompts = make_prompts(number)
    parameters = BeamSearchParams(beam_width=WIDTH, max_tokens=MAX_TOKENS, temperature=0.0)
    started = time.perf_counter()
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], parameters)
    seconds = time.perf_counter() - started
    answers = [
        [sequence.tokens[len(prompt) :] for sequence in output.sequences]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return {"seconds": seconds, "answers": answers}


def measure(side: str, number: int) -> dict:
    command = [sys.executable, __file__, "--side", side, "--requests", str(number)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def count_same(ours: list, theirs: list, end_token: int = 2) -> int:
    """Requests whose choices are the same tokens in the same order; an ending token is or isn't kept."""

    def plain(answers: list) -> list:
        return [tokens[: tokens.index(end_token)] if end_token in tokens else tokens for tokens in answers]

    return sum(plain(a) == plain(b) for a, b in zip(ours, theirs, strict=True))


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Four requests and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of all sides.")] = 2,
    requests: Annotated[int, typer.Option(help="How many requests, up to 16.")] = len(LANDS),
    skip_default: Annotated[
        bool, typer.Option("--skip-default", help="Without vLLM's own settings; hours on some CPUs.")
    ] = False,
    side: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Requests a second of our beam search over those of vLLM's."""
    number = 4 if quick else requests
    if side is not None:
        print(json.dumps(run_ours(number) if side == "ours" else run_vllm(number, same_settings=side == "same")))
        return
    told: dict[str, list[dict]] = {"ours": [], "same": []} | ({} if skip_default else {"default": []})
    for turn in range(1 if quick else rounds):
        for name in told if turn % 2 == 0 else reversed(list(told)):
            told[name].append(measure(name, number))
    rates = {name: [number / one["seconds"] for one in rounds] for name, rounds in told.items()}
    ours = told["ours"]
    report(
        [
            *(
                Figure(f"beam search: ours / vLLM's, {name}", rates["ours"], rates[side], aim=aim, unit="requests/s")
                for side, name, aim in (("default", "default", 8), ("same", "same settings", 2.5))
                if side in rates
            ),
            Figure(
                "beams / n=4 sampling, answer tokens",
                [one["tokens_per_s"] for one in ours],
                [one["sampled_per_s"] for one in ours],
                aim=None,
                unit="tokens/s",
            ),
            Figure(
                "requests with the same answers in the same order, of all",
                [
                    float(count_same(one["answers"], peer["answers"]))
                    for one, peer in zip(ours, told["same"], strict=True)
                ],
                [float(number) for _ in ours],
                aim=1,
                unit="requests",
            ),
            Figure(
                "tokens that our search generated", [one["search_tokens"] for one in ours], [], aim=None, unit="tokens"
            ),
        ],
        json_file,
    )


if __name__ == "__main__":
    typer.run(main)
