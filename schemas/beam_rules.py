"""What a beam search honours of the other fields, and what it refuses by name. Like the rules of `schemas/rules.py`."""

from collections.abc import Mapping
from typing import Any

from schemas.dialects import GUIDED
from schemas.failures import Failure
from schemas.limits import MAX_BIASED, MAX_PENALISED
from schemas.requests import Endpoint
from schemas.rules import Body, Judge, Rule, max_tokens_of, refuse, show

# The engine tells the log-probabilities of so many given tokens.
MAX_ALLOWED = 128
# Powers of a length that, and by which a sum of log-probabilities, a number can hold whatever the length.
MAX_LENGTH_PENALTY = 16

# What it doesn't honour, why, and the values that ask for nothing.
_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "repetition_penalty": ("it divides logits, and a search sees log-probabilities", (1,)),
    "top_p": ("a search draws nothing", (1,)),
    "top_k": ("a search draws nothing", (0, -1)),
    "min_p": ("a search draws nothing", (0,)),
    "structured_outputs": ("a search doesn't keep to a grammar", ()),
    "response_format": ("a search doesn't keep to a grammar", ({"type": "text"},)),
    **dict.fromkeys(GUIDED, ("a search doesn't keep to a grammar", ())),
    "logprob_token_ids": ("a search looks at the likeliest tokens", ([],)),
    "repetition_detection": ("a search doesn't end a beam for what it repeats", ()),
    "prompt_embeds": ("a search goes on from tokens", ([], "")),
    "tools": ("a search doesn't keep to the form of a tool call", ([],)),
}


def beam_search(endpoint: Endpoint) -> Rule:
    """The rule of `use_beam_search`."""

    def rule(field: str, value: bool, body: Body, judge: Judge) -> Failure | None:
        return _check(body, endpoint, judge) if value else None

    return rule


def _check(body: Body, endpoint: Endpoint, judge: Judge) -> Failure | None:
    for name, (why, neutral) in _REFUSED.items():
        if (given := body.get(name)) is not None and given not in neutral:
            return _refuse(name, f"{why}. Leave it out, or the beams")
    for name in ("presence_penalty", "frequency_penalty"):
        if (body.get(name) or 0) < 0:
            message = f"found {show(body[name])}; a search can't know when it is over if tokens are lifted"
            return _refuse(name, f"{message}. Give a number from 0")
    for key, bias in (body.get("logit_bias") or {}).items():
        if bias > 0:
            message = f"found {show(bias)}; a search can't know when it is over if tokens are lifted"
            return _refuse(f"logit_bias.{key}", f"{message}. Give a number up to 0")
    if (penalty := body.get("length_penalty")) is not None and not abs(penalty) <= MAX_LENGTH_PENALTY:
        expected = f"expected a number from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}"
        return _refuse("length_penalty", f"found {show(penalty)}, {expected} beside beams")
    if body.get("echo") and endpoint == "/v1/completions" and body.get("max_tokens") == 0:
        return _refuse("max_tokens", "found 0; a beam search generates one token at least")
    return _check_sizes(body, endpoint, judge)


def _check_sizes(body: Body, endpoint: Endpoint, judge: Judge) -> Failure | None:
    width = body.get("n") or 1
    if judge.limits is not None and width > judge.limits.max_beams:
        message = f"found {show(width)} beams, at most {judge.limits.max_beams} (--engine max_beams)"
        return refuse("too_many_choices", "n", message)
    # Each bad word is two: with and without a space before it. Ends are forbidden as long as an answer is too short.
    biased = {"logit_bias": len(body.get("logit_bias") or {}), "bad_words": 2 * len(body.get("bad_words") or ())}
    if body.get("min_tokens"):
        biased["stop_token_ids"] = len(body.get("stop_token_ids") or ())
    if sum(biased.values()) > MAX_BIASED:
        largest = max(biased, key=lambda name: biased[name])
        message = f"found {sum(biased.values()):,} tokens that are biased or forbidden, at most {MAX_BIASED}"
        return _refuse(largest, f"{message} beside beams. Give fewer")
    if body.get("presence_penalty") or body.get("frequency_penalty"):
        most = max_tokens_of(body, endpoint)
        if most is None or most > MAX_PENALISED:
            found = "nothing" if most is None else show(most)
            message = f"found {found}; penalised beams are at most {MAX_PENALISED} tokens long. Give max_tokens"
            return _refuse("max_tokens", message)
    allowed = body.get("allowed_token_ids")
    if allowed is not None and len(allowed) > MAX_ALLOWED:
        return _refuse("allowed_token_ids", f"found {len(allowed)} ids, at most {MAX_ALLOWED} beside beams")
    if allowed is not None and body.get("logprobs") not in (None, False):
        return _refuse("logprobs", "a search among allowed_token_ids knows no others' log-probabilities. Leave it out")
    return None


def _refuse(field: str, message: str) -> Failure:
    return refuse("beam_unsupported", field, message)
