"""Requests that no engine can serve, straight to the real engine, past every check: each fails alone, and nobody
else's answer changes by a token."""

import json
import random

import pytest

from schemas.requests import Answered, Failed, Request

pytestmark = pytest.mark.engine

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LANDS = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Norway", "Chile", "India", "Kenya")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}

# One request of each kind; `{}` is a land's name.
KINDS = [
    (COMPLETIONS, {"prompt": "The capital of {} is", "temperature": 0}),
    (COMPLETIONS, {"prompt": "{}: once", "temperature": 1, "seed": 5, "n": 3, "priority": 3}),
    (COMPLETIONS, {"prompt": "{} is", "temperature": 0.7, "seed": 9, "min_p": 0.1, "top_p": 0.9, "priority": -3}),
    (COMPLETIONS, {"prompt": "I went to {}.", "echo": True, "logprobs": 2, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "The river of {}", "logprobs": 0, "temperature": 0, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": "{} or not?", "structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0}),
    (COMPLETIONS, {"prompt": "JSON of {}:", "structured_outputs": {"json": SCHEMA}, "temperature": 0}),
    (COMPLETIONS, {"prompt": "In {} they", "stop": [" and", "."], "temperature": 0, "bad_words": ["are"]}),
    (COMPLETIONS, {"prompt": ["{} one", "{} two"], "temperature": 0, "logit_bias": {"30": -100}}),
    (COMPLETIONS, {"prompt": [504, 3575, 282, 4649, 314], "temperature": 0, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "{} has", "use_beam_search": True, "n": 3, "stop": ["."], "priority": 1}),
    (COMPLETIONS, {"prompt": "{} has", "temperature": 0, "logprobs": 1, "logprob_token_ids": [30, 28]}),
    (COMPLETIONS, {"prompt": "{} {} {}", "temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 1}),
    (COMPLETIONS, {"prompt": "A long way to {} and", "temperature": 0, "truncate_prompt_tokens": 3}),
    (CHATS, {"messages": [{"role": "user", "content": "Where is {}?"}], "temperature": 0}),
    (CHATS, {"messages": [{"role": "user", "content": "{}?"}], "temperature": 0, "logprobs": True, "top_logprobs": 1}),
    (CHATS, {"messages": [{"role": "user", "content": "{}?"}], "use_beam_search": True, "n": 2}),
]

POISON = [
    (COMPLETIONS, {"prompt": [10**9]}),
    (COMPLETIONS, {"prompt": [49152]}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "a " * 9_000}),
    (COMPLETIONS, {"prompt": "a " * 9_000, "use_beam_search": True, "n": 4}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": ["ok", ""]}),
    (COMPLETIONS, {"prompt": "a", "n": 100_000}),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 100_000}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"grammar": "root ::= what"}}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {"type": "nothing"}}}),
    (COMPLETIONS, {"prompt": "a", "logprobs": 40_000}),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 40_000}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999999": 1}}),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [99_999_999]}),
    (COMPLETIONS, {"prompt": "a", "logprobs": 1, "logprob_token_ids": [99_999_999]}),
    (COMPLETIONS, {"prompt": "a", "model": "nobody"}),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}),
    (CHATS, {"messages": [{"role": "user", "content": "a " * 9_000}]}),
]


def fill(value, land):
    """A kind's body for one land."""
    if isinstance(value, str):
        return value.replace("{}", land)
    if isinstance(value, list):
        return [fill(one, land) for one in value]
    return {key: fill(one, land) for key, one in value.items()} if isinstance(value, dict) else value


def make_requests(number):
    made = []
    for index in range(number):
        endpoint, body = KINDS[index % len(KINDS)]
        land = f"{LANDS[index % len(LANDS)]} {index}"
        made.append(Request(str(index), endpoint, json.dumps({"max_tokens": 6, **fill(body, land)})))
    return made


def answers(engine, requests):
    sent = [engine.submit(request, lane="batch") for request in requests]
    return {request.id: future.result(timeout=900) for request, future in zip(requests, sent, strict=True)}


def told(event):
    """What was generated: texts, why they ended, and the tokens."""
    assert isinstance(event, Answered), event
    return [
        (choice.get("text") or choice.get("message"), choice["finish_reason"], choice.get("token_ids"))
        for choice in event.body["choices"]
    ]


@pytest.mark.parametrize("number", [102, pytest.param(480, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_poison_is_its_own_failure_and_changes_nobodys_answer(engine, number):
    good = make_requests(number)
    poison = [Request(f"poison {index}", *kind[:1], json.dumps(kind[1])) for index, kind in enumerate(POISON)]
    alone = answers(engine, good)
    mixed = [*good, *poison]
    random.Random(number).shuffle(mixed)  # noqa: S311
    together = answers(engine, mixed)
    for request in good:
        assert told(together[request.id]) == told(alone[request.id]), request
        json.dumps(together[request.id].body, allow_nan=False)
    for request in poison:
        event = together[request.id]
        assert isinstance(event, Failed), (request.body[:100], event)
        assert 400 <= event.failure.status_code < 500 and event.failure.message, (request.body[:100], event.failure)
