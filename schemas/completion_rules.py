"""Rules for completion bodies alone. Like those of `schemas/rules.py`."""

from collections.abc import Mapping
from typing import Any

from schemas.beam_rules import beam_search
from schemas.failures import Failure
from schemas.rules import (
    COMMON,
    INT64_MAX,
    Body,
    Judge,
    Rule,
    both,
    check_logprobs,
    check_structured_outputs,
    check_token_ids,
    feature,
    min_tokens,
    refuse,
    show,
    unsupported,
    whole,
)

MAX_LOGPROB_TOKEN_IDS = 128
# A list of prompts is answered all or nothing; more of them in one request are better written as more lines.
MAX_PROMPTS = 1024


def _max_tokens(field: str, value: int, body: Body, judge: Judge) -> Failure | None:
    if value >= 1 or (value == 0 and body.get("echo") and "prompt" in body):
        return None
    hint = "; 0 only with echo" if value == 0 and "prompt" in body else ""
    return refuse("out_of_range", field, f"found {show(value)}, expected a whole number from 1{hint}")


def _logprob_token_ids(field: str, value: list[int], body: Body, judge: Judge) -> Failure | None:
    if not value:
        return None
    if not body.get("logprobs") and body.get("logprobs") != 0:
        return refuse("logprobs_missing", field, "expected with logprobs alone. Give logprobs beside it")
    if body.get("echo") and body.get("max_tokens") == 0:
        return refuse("logprobs_missing", field, "found with max_tokens 0, which generates no position to report of")
    if len(value) > MAX_LOGPROB_TOKEN_IDS:
        return refuse("too_many_logprobs", field, f"found {len(value)} ids, at most {MAX_LOGPROB_TOKEN_IDS}")
    return check_token_ids(field, value, body, judge)


def _repetition_detection(field: str, value: dict[str, int], body: Body, judge: Judge) -> Failure | None:
    most, least, count = (value.get(name, 0) for name in ("max_pattern_size", "min_pattern_size", "min_count"))
    if not 0 <= least <= most <= INT64_MAX:
        return refuse("out_of_range", field, f"found patterns of {show(least)} to {show(most)} tokens")
    if most > 0 and not 2 <= count <= INT64_MAX:
        return refuse("out_of_range", f"{field}.min_count", f"found {show(count)}, expected a whole number from 2")
    return None


def _thinking_token_budget(field: str, value: int, body: Body, judge: Judge) -> Failure | None:
    if value == -1:
        return None
    return refuse("unsupported_field", field, "this engine doesn't tell thoughts from answers. Leave it out")


def _prompt(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    """One text, one list of token ids, or a list of either; the schema has seen that it is one of these."""
    if not value:
        return _empty_prompt(field)
    if isinstance(value, str):
        return None
    if isinstance(value[0], int | float):
        return check_token_ids(field, value, body, judge)
    if len(value) > MAX_PROMPTS:
        return refuse("too_many_prompts", field, f"found {len(value):,} prompts, at most {MAX_PROMPTS:,} a request")
    for index, prompt in enumerate(value):
        path = f"{field}[{index}]"
        failure = check_token_ids(path, prompt, body, judge) if prompt and isinstance(prompt, list) else None
        if not prompt or failure is not None:
            return failure or _empty_prompt(path)
    return None


def _empty_prompt(path: str) -> Failure:
    return refuse("empty_prompt", path, "found no text and no token, expected a prompt of one token at least")


COMPLETION: Mapping[str, Rule] = {
    **COMMON,
    "prompt": _prompt,
    "prompt_embeds": feature("prompt_embeds", "embeddings reach the model as they are"),
    "max_tokens": both(whole(), _max_tokens),
    "min_tokens": min_tokens("/v1/completions"),
    "use_beam_search": beam_search("/v1/completions"),
    "logprobs": check_logprobs,
    "logprob_token_ids": _logprob_token_ids,
    "structured_outputs": check_structured_outputs,
    "repetition_detection": _repetition_detection,
    "suffix": unsupported("this engine fills no gap before a suffix"),
    "watermarking": unsupported("this engine has no watermark"),
    "thinking_token_budget": _thinking_token_budget,
    "routed_experts_prompt_start": unsupported("this engine reports no routed experts"),
    "return_token_offsets": unsupported("answers carry no token offsets", "Leave it out; return_token_ids works"),
    "ec_transfer_params": unsupported("this engine hands no encoder cache to another one"),
}
