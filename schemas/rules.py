"""What a JSON Schema can't say of a request: one place, for both doors. Each rule has a `reason` of its own.

A rule looks at one field that is there and isn't null; it is asked only then, so that a request pays for what it says.
Rules that need the model's limits are silent without them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.requests import Endpoint

Door = Literal["batch", "online"]
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Judge:
    """By what a request is judged: the door it comes through, and the limits of the model where they are known."""

    door: Door = "batch"
    limits: ModelLimits | None = None


Rule = Callable[[str, Any, Body, Judge], Failure | None]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


# A path to the field at fault is cut to this; paths of fields that a schema knows are shorter.
MAX_PATH = 200
# Rules cut what they show; this holds for a rule that forgot to.
_MAX_WORDS = 600


def refuse(reason: str, field: str, message: str, status: int = 400) -> Failure:
    field = plain(field, MAX_PATH)
    return Failure(status, reason, f"{field}: {plain(message, _MAX_WORDS)}", field)


def plain(text: str, most: int = 60) -> str:
    """Text of a request as a message holds it: on one line, cut, and nothing in it that a terminal would obey."""
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:most])[:most]
    return shown if len(text) <= most else f"{shown}…"


def show(value: Any, most: int = 60) -> str:
    """A value of a request, short enough for a message whatever it is; Python itself prints no number so long."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of more than 30 digits"
    return plain(repr(value), most)


# --- kinds of rules -------------------------------------------------------------------------------------------------


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Rule:
    """The value lies from `low` to `high`; `above`: it is greater than this."""
    if above is not None:
        words = f"a number above {above:g}" + (f", up to {high:g}" if high is not None else "")
    elif high is None:
        words = f"a number from {low:g}"
    else:
        words = f"a number from {low:g} to {high:g}"

    def rule(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
        if (above is None or value > above) and (low is None or value >= low) and (high is None or value <= high):
            return None
        return refuse("out_of_range", field, f"found {show(value)}, expected {words}")

    return rule


def whole(low: int = INT64_MIN, high: int = INT64_MAX) -> Rule:
    """The value is a whole number that the engine can hold, from `low` to `high`."""
    bound = f"from {low}" if high == INT64_MAX else f"from {low} to {high}"
    words = "a signed 64-bit number" if low == INT64_MIN else f"a whole number {bound}"

    def rule(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
        return None if low <= value <= high else refuse("out_of_range", field, f"found {show(value)}, expected {words}")

    return rule


def unsupported(why: str, advice: str = "Leave it out") -> Rule:
    """No engine here can do this; empty values ask for nothing and pass."""

    def rule(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
        return refuse("unsupported_field", field, f"{why}. {advice}") if value else None

    return rule


def feature(name: str, why: str) -> Rule:
    """Refused unless the operator allows it."""

    def rule(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
        if judge.limits is None or name in judge.limits.allowed:
            return None
        message = f"{why}, so it is refused unless the operator allows it (--engine allow={name})"
        return refuse("feature_off", field, message)

    return rule


def both(*rules: Rule) -> Rule:
    """The first that fails of several."""

    def rule(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
        return next((failure for one in rules if (failure := one(field, value, body, judge)) is not None), None)

    return rule


# --- single fields --------------------------------------------------------------------------------------------------


def _model(field: str, value: str, body: Body, judge: Judge) -> Failure | None:
    if judge.limits is None:
        return None
    names = judge.limits.served_names + judge.limits.adapter_names
    if value in names:
        return None
    served = " or ".join(names)
    message = (
        f"found {show(value, 100)}, served here is {served}. Leave the field out, or give a --served-name or --adapter"
    )
    return refuse("unknown_model", field, message, 404)


def _stream(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    if judge.door == "batch" and value:
        message = f"found {value!r}; a batch file has nobody to stream to. Leave the field out."
        return refuse("stream_in_batch", field, message)
    if field == "stream_options" and not body.get("stream"):
        return refuse("stream_options_without_stream", field, "expected with stream: true alone. Leave it out")
    if field == "stream" and value and body.get("use_beam_search"):
        return refuse("beam_unsupported", field, "a beam search has nothing to send before its end. Leave it out")
    return None


def _choices(field: str, value: int, body: Body, judge: Judge) -> Failure | None:
    if value < 1:
        return refuse("out_of_range", field, f"found {show(value)}, expected a whole number from 1")
    if judge.limits is not None and not body.get("use_beam_search") and value > judge.limits.max_choices:
        bound = judge.limits.max_choices
        return refuse("too_many_choices", field, f"found {show(value)}, at most {bound} (--engine max_choices)")
    temperature = body.get("temperature")
    if value > 1 and temperature is not None and temperature < 1e-5 and not body.get("use_beam_search"):
        found = f"found {show(value)} with temperature {show(temperature)}, which gives one answer {show(value)} times"
        return refuse("choices_need_sampling", field, f"{found} over. Raise temperature, or leave n out")
    return None


def min_tokens(endpoint: Endpoint) -> Rule:
    """A whole number from 0, and not more than `max_tokens`."""

    def rule(field: str, value: int, body: Body, judge: Judge) -> Failure | None:
        if value < 0:
            return refuse("out_of_range", field, f"found {show(value)}, expected a whole number from 0")
        most = max_tokens_of(body, endpoint)
        if most is not None and value > most:
            return refuse("out_of_range", field, f"found {show(value)}, more than max_tokens, which is {show(most)}")
        return None

    return both(whole(), rule)


def max_tokens_of(body: Body, endpoint: Endpoint) -> int | None:
    """Most tokens of an answer: as the request says, or 16 for a completion; None: a chat to the context's end.

    A completion may hold anything under the names of a chat's fields: only its own are looked at.
    """
    if endpoint == "/v1/completions":
        given = body.get("max_tokens")
        return 16 if given is None else int(given)
    given = next((n for f in ("max_completion_tokens", "max_tokens") if (n := body.get(f)) is not None), None)
    return None if given is None else int(given)


def check_logprobs(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    if value < -1:
        return refuse("out_of_range", field, f"found {show(value)}, expected a whole number from 0, or -1 for all")
    if field == "top_logprobs" and value and not body.get("logprobs"):
        return refuse("logprobs_missing", field, f"found {show(value)} without logprobs. Give logprobs: true beside it")
    if judge.limits is None:
        return None
    wanted = judge.limits.vocab_size if value == -1 else value
    if wanted > judge.limits.max_logprobs:
        found = f"-1, which is all {wanted:,} of the vocabulary," if value == -1 else f"{show(value)},"
        message = f"found {found} at most {judge.limits.max_logprobs} (--engine max_logprobs)"
        return refuse("too_many_logprobs", field, message)
    return None


def check_token_ids(field: str, value: list[int], body: Body, judge: Judge) -> Failure | None:
    if judge.limits is None or not value:
        return None
    size = judge.limits.vocab_size
    if min(value) >= 0 and max(value) < size:
        return None
    index = next(index for index, token in enumerate(value) if not 0 <= token < size)
    return _out_of_vocabulary(f"{field}[{index}]", value[index], size)


def _out_of_vocabulary(path: str, found: Any, size: int) -> Failure:
    return refuse("token_out_of_vocabulary", path, f"found {show(found)}, token ids of this model are 0 to {size - 1}")


def _allowed_token_ids(field: str, value: list[int], body: Body, judge: Judge) -> Failure | None:
    if not value:
        return refuse("out_of_range", field, "found an empty list, which allows nothing. Leave it out")
    return check_token_ids(field, value, body, judge)


def _logit_bias(field: str, value: dict[str, float], body: Body, judge: Judge) -> Failure | None:
    size = judge.limits.vocab_size if judge.limits is not None else None
    for key in value:
        if not (key.isascii() and key.isdigit()):
            return refuse("token_out_of_vocabulary", f"{field}.{key[:60]}", "found a key that is no token id")
        if size is not None and (len(key) > 12 or int(key) >= size):
            return _out_of_vocabulary(f"{field}.{key[:60]}", key, size)
    return None


def _texts(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    if value == "" and field != "bad_words":
        return refuse("empty_text", field, "found an empty string, which stops at once. Leave it out")
    if isinstance(value, list) and "" in value:
        return refuse("empty_text", f"{field}[{value.index('')}]", "found an empty string. Leave it out")
    return None


def _truncate(field: str, value: int, body: Body, judge: Judge) -> Failure | None:
    if value == 0:
        return refuse("empty_prompt", field, "found 0, which leaves no prompt. Give a whole number from 1, or -1")
    if judge.limits is not None and value > judge.limits.context_length:
        message = f"found {show(value)}, the model's context has {judge.limits.context_length:,} tokens"
        return refuse("out_of_range", field, message)
    return None


def _response_format(field: str, value: dict[str, Any], body: Body, judge: Judge) -> Failure | None:
    if value.get("type") != "json_schema":
        return None
    given = value.get("json_schema")
    if given is None or given.get("schema") is None:
        found = "nothing" if given is None else "no schema in it"
        return refuse("bad_constraint", f"{field}.json_schema", f"found {found}, expected name and schema")
    return None


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def check_structured_outputs(field: str, value: dict[str, Any], body: Body, judge: Judge) -> Failure | None:
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


# --- fields of old ----------------------------------------------------------------------------------------------------

# Fields that the engine ignores: names that it took once, and likely mistakes. The second is today's name.
RETIRED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding_backend": "",
    "guided_meta": "",
    "structural_tag": "structured_outputs.structural_tag",
    "best_of": "n",
    "use_beamsearch": "use_beam_search",
    "extra_body": "",
}


def _retired(field: str, value: Any, body: Body, judge: Judge) -> Failure | None:
    new = RETIRED[field]
    advice = f"write it as {new}" if new else "leave it out"
    if field == "extra_body":
        advice = "it is a client library's argument; write its fields beside the others"
    return refuse("retired_field", field, f"this field does nothing; {advice}")


COMMON: Mapping[str, Rule] = {
    "model": _model,
    "stream": _stream,
    "stream_options": _stream,
    "temperature": number(0, 2),
    "top_p": number(above=0, high=1),
    "min_p": number(0, 1),
    "top_k": whole(-1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(above=0),
    "n": _choices,
    "prompt_logprobs": check_logprobs,
    "stop": _texts,
    "bad_words": _texts,
    "stop_token_ids": check_token_ids,
    "allowed_token_ids": _allowed_token_ids,
    "logit_bias": _logit_bias,
    "seed": whole(),
    "priority": whole(),
    "truncate_prompt_tokens": both(whole(), _truncate),
    "response_format": _response_format,
    "kv_transfer_params": unsupported("this engine hands no KV cache to another one"),
    "vllm_xargs": unsupported("no extension that takes arguments is installed here"),
    **dict.fromkeys(RETIRED, _retired),
}
