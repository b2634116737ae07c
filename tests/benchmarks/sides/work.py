"""The requests that benchmarks give to their sides: made from words by chance, the same for the same number.

All end by `max_tokens` alone (`ignore_eos`), so that all sides generate as many tokens.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Each is one token of the embedded model, with the space before it.
WORDS = "the river wind stone letter garden night bread paper market winter door road voice light water"
MODEL = "smollm2-135m-instruct"


def make_requests(number: int) -> list[dict]:
    """Completions of mixed lengths: prompts of 8 to 160 words, answers of 16 to 96 tokens."""
    draw = random.Random(number)  # noqa: S311 - work to repeat, not a secret
    return [
        _completion(f"{index}: " + _words(draw, draw.randint(8, 160)), draw.randint(16, 96)) for index in range(number)
    ]


def as_chats(completions: Iterable[dict]) -> list[dict]:
    """The same prompts as chats of one turn, each in the envelope of OpenAI's batch files."""
    return [
        {
            "custom_id": f"row-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                **{name: value for name, value in body.items() if name != "prompt"},
                "model": MODEL,
                "messages": [{"role": "user", "content": body["prompt"]}],
            },
        }
        for index, body in enumerate(completions)
    ]


@dataclass(frozen=True)
class SharedPrefixes:
    """Completions over a few long prefixes, shuffled, some of them more than once."""

    requests: list[dict]
    prefixes: list[str]

    @property
    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.requests]


def make_shared_prefixes(number: int, num_prefixes: int = 32) -> SharedPrefixes:
    """Prefixes of 400 to 600 words; a tail of 8 to 32 words and 8 to 32 tokens of answer for each request. A fifth of
    the requests are exact repetitions of others."""
    draw = random.Random(number)  # noqa: S311 - work to repeat, not a secret
    prefixes = [f"{index}: " + _words(draw, draw.randint(400, 600)) for index in range(num_prefixes)]
    num_repeated = number // 5
    requests = [
        _completion(
            f"{prefixes[index % num_prefixes]} {index}: " + _words(draw, draw.randint(8, 32)), draw.randint(8, 32)
        )
        for index in range(number - num_repeated)
    ]
    requests += draw.choices(requests, k=num_repeated)
    draw.shuffle(requests)
    return SharedPrefixes(requests, prefixes)


def count_shareable(prompts: Iterable[Sequence[int]], block_size: int = 32) -> int:
    """Tokens that a prefix cache can spare at most, over prompts as token ids: each block of the tree of all prompts
    is computed once. Equal prompts count once; a prompt's last token is always computed."""
    blocks, num_blocks = set(), 0
    for prompt in {tuple(prompt) for prompt in prompts}:
        ends = range(block_size, len(prompt), block_size)
        num_blocks += len(ends)
        blocks |= {prompt[:end] for end in ends}
    return (num_blocks - len(blocks)) * block_size


def write_lines(path: Path, bodies: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def _words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choices(WORDS.split(), k=number))


def _completion(prompt: str, max_tokens: int) -> dict:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
