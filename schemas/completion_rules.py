"""Rules for completion bodies alone. Like those of `schemas/rules.py`."""

from collections.abc import Mapping
from typing import Any

from schemas.failures import Failure
from schemas.rules import (
    COMMON,
    INT64_MAX,
    Body,
    Judge,
    Rule,
    check_logprobs,
    check_token_ids,
    feature,
    refuse,
    show,
    unsupported,
)

MAX_LOGPROB_TOKEN_IDS = 128
# A list of prompts is answered all or nothing; more of them in one request are better written as more lines.
MAX_PROMPTS = 1024


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


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _structured_outputs(field: str, value: dict[str, Any], body: Body, judge: Judge) -> Failure | None:
    given = [name for name in _CONSTRAINTS if value.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        return refuse("bad_constraint", field, f"found {found}, expected one of {', '.join(_CONSTRAINTS)}")
    path = f"{field}.{given[0]}"
    if (value[given[0]] in ("", []) and given[0] != "regex") or value[given[0]] is False:
        return refuse("bad_constraint", path, f"found {value[given[0]]!r}, which says nothing. Leave it out")
    if value.get("_backend"):
        message = "the engine chooses it. Leave it out"
        return refuse("bad_constraint", f"{field}._backend", message)
    form = body.get("response_format")
    if form is not None and form.get("type") != "text":
        return refuse("bad_constraint", field, "found beside response_format; a request has one of them")
    return None


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
    "logprobs": check_logprobs,
    "logprob_token_ids": _logprob_token_ids,
    "structured_outputs": _structured_outputs,
    "repetition_detection": _repetition_detection,
    "suffix": unsupported("this engine fills no gap before a suffix"),
    "watermarking": unsupported("this engine has no watermark"),
    "thinking_token_budget": _thinking_token_budget,
    "routed_experts_prompt_start": unsupported("this engine reports no routed experts"),
    "return_token_offsets": unsupported("answers carry no token offsets", "Leave it out; return_token_ids works"),
    "ec_transfer_params": unsupported("this engine hands no encoder cache to another one"),
}
