"""What is sent back: the models and the published schemas take the same bodies, and change none."""

import json

import jsonschema_rs
import pytest

from schemas import generate
from schemas.contract import check_body
from schemas.failures import ERROR_TYPES, Failure
from schemas.requests import Answered, Request

USAGE = {
    "prompt_tokens": 5,
    "total_tokens": 7,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": None, "created_cache_tokens": None},
    "completion_tokens_details": None,
}
PROMPT_LOGPROBS = [
    None,
    {"3575": {"logprob": -8.25, "rank": 1406, "decoded_token": " capital"}, "28": {"logprob": -1.5, "rank": 1}},
]
COMPLETION = {
    "id": "cmpl-2f6b",
    "object": "text_completion",
    "created": 1764460800,
    "model": "smollm2-135m-instruct",
    "choices": [
        {
            "index": 0,
            "text": "The capital of France is Paris.",
            # Echoed and scored: nothing comes before the first token.
            "logprobs": {
                "text_offset": [0, 3],
                "token_logprobs": [None, -9999.0],
                "tokens": ["The", " capital"],
                "top_logprobs": [None, {" capital": -9999.0, ",": -1.5}],
            },
            "finish_reason": "stop",
            "stop_reason": 30,
            "token_ids": None,
            "prompt_logprobs": PROMPT_LOGPROBS,
            "prompt_token_ids": [504, 3575],
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": None,
    "usage": USAGE,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
}
TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CHAT_LOGPROBS = {
    "content": [
        {
            "token": "é",
            "logprob": -0.125,
            "bytes": [195, 169],
            "top_logprobs": [{"token": "é", "logprob": -0.125, "bytes": [195, 169]}, {"token": "e", "bytes": None}],
        }
    ]
}
CHAT = {
    "id": "chatcmpl-2f6b",
    "object": "chat.completion",
    "created": 1764460800,
    "model": "smollm2-135m-instruct",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [TOOL_CALL]},
            "logprobs": None,
            "finish_reason": "tool_calls",
            "stop_reason": None,
        },
        {
            "index": 1,
            "message": {"role": "assistant", "content": "é", "reasoning": None},
            "logprobs": CHAT_LOGPROBS,
            "finish_reason": "stop",
            "stop_reason": "\n\n",
            "token_ids": None,
        },
    ],
    "usage": USAGE,
    "prompt_logprobs": PROMPT_LOGPROBS,
    "kv_transfer_params": None,
}


def completion_chunk(**choice):
    return {key: COMPLETION[key] for key in ("id", "object", "created", "model")} | {"choices": [choice]}


def chat_chunk(**choice):
    envelope = {key: CHAT[key] for key in ("id", "created", "model")}
    return envelope | {"object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}


CALL_BEGINS = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "weather", "arguments": ""}}
BREACH = {"loc": ["body", "prompt", 3], "msg": "found -1", "type": "schema"}
ERROR = {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}

# By schema: bodies that are sent.
GOOD = {
    "completion_response": [COMPLETION],
    "completion_chunk": [
        completion_chunk(index=0, text=" Paris", logprobs=None, finish_reason=None, stop_reason=None),
        completion_chunk(index=1, text="", logprobs=COMPLETION["choices"][0]["logprobs"], finish_reason="length"),
        {**completion_chunk(), "choices": [], "usage": USAGE, "system_fingerprint": "vllm"},
    ],
    "chat_completion_response": [
        CHAT,
        {"model": "m", "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}}], "usage": {}},
    ],
    "chat_completion_chunk": [
        chat_chunk(delta={"role": "assistant", "content": ""}, logprobs=None, finish_reason=None),
        chat_chunk(delta={"content": "é"}, logprobs=CHAT_LOGPROBS),
        chat_chunk(delta={"tool_calls": [CALL_BEGINS]}),
        chat_chunk(delta={"tool_calls": [{"index": 0, "function": {"arguments": '{"city'}}]}),
        chat_chunk(delta={}, finish_reason="tool_calls", stop_reason=None),
        {**chat_chunk(), "choices": [], "usage": USAGE},
    ],
    "legacy_chat_response": [
        {"created": 1764460800.5, "text": "Hello."},
        {"created": 1764460800, "text": "", "tool_calls": [TOOL_CALL], "reasoning_content": None},
    ],
    "legacy_chat_chunk": [{"created": 1764460800, "idx": 1, "text": " you", "tool_calls": None}],
    "error_response": [{"error": ERROR}, {"error": {**ERROR, "param": None}, "status_code": 404}],
    "http_validation_error": [{"detail": [BREACH]}, {}],
    "completion_http_validation_error": [
        {"detail": [{**BREACH, "input": -1, "ctx": {"ge": 0}}, BREACH, {**BREACH, "input": None}]}
    ],
    "failure_response": [{"status_code": 404, "error": {**ERROR, "reason": "model_not_found"}}],
}


def changed(body, path, value=...):
    """A copy of a body with another value at a path; without a value: with nothing there."""
    body = json.loads(json.dumps(body))
    *way, last = path
    here = body
    for step in way:
        here = here[step]
    if value is ...:
        del here[last]
    else:
        here[last] = value
    return body


# By schema: what is changed in the first good body, which no caller could make sense of then.
BAD = {
    "completion_response": [
        (["choices"],),
        (["usage"],),
        (["usage"], None),
        (["object"], "chat.completion"),
        (["created"], "today"),
        (["choices", 0, "text"], None),
        (["choices", 0, "finish_reason"],),
        (["choices", 0, "stop_reason"], 1.5),
        (["choices", 0, "logprobs", "tokens"],),
        (["choices", 0, "logprobs", "token_logprobs", 1], "-inf"),
        (["choices", 0, "prompt_logprobs", 1, "28"], -1.5),
        (["usage", "prompt_tokens"], None),
    ],
    "completion_chunk": [(["choices", 0, "text"],), (["id"],), (["choices"], None)],
    "chat_completion_response": [
        (["model"],),
        (["object"], "chat.completion.chunk"),
        (["choices", 0, "message"],),
        (["choices", 0, "message", "role"],),
        (["choices", 0, "message", "tool_calls"], None),
        (["choices", 0, "message", "tool_calls", 0, "type"], "custom"),
        (["choices", 0, "message", "tool_calls", 0, "function", "arguments"], {"city": "Paris"}),
        (["choices", 1, "logprobs", "content", 0, "token"],),
        (["choices", 1, "logprobs", "content", 0, "bytes"], "é"),
    ],
    "chat_completion_chunk": [
        (["choices", 0, "delta"],),
        (["choices", 0, "delta", "content"], ["a"]),
        (["choices", 0, "delta", "tool_calls"], [{"id": "call_1"}]),
        (["object"], "chat.completion"),
    ],
    "legacy_chat_response": [(["text"],), (["created"], "today"), (["tool_calls"], {})],
    "legacy_chat_chunk": [(["idx"],), (["idx"], "1")],
    "error_response": [(["error"], "no such model"), (["error", "code"], "404"), (["error", "type"],)],
    "http_validation_error": [
        (["detail"], "no"),
        (["detail"], None),
        (["detail", 0, "loc"], "body.prompt"),
        (["detail", 0, "loc", 0], 0.5),
        (["detail", 0, "type"],),
    ],
    "completion_http_validation_error": [(["detail", 0, "ctx"], "ge"), (["detail", 0, "msg"],)],
    "failure_response": [(["status_code"],), (["status_code"], 200), (["error", "reason"],), (["detail"], [{}])],
}


def pairs(bodies):
    return [
        pytest.param(kind, case, id=f"{kind}-{i}") for kind, cases in bodies.items() for i, case in enumerate(cases)
    ]


def schema(kind):
    return jsonschema_rs.Draft202012Validator(json.loads((generate.HERE / f"{kind}.schema.json").read_text()))


def model(kind):
    return generate.MODELS[f"{kind}.schema.json"]


def assert_fits(body, *kinds):
    for kind in kinds:
        schema(kind).validate(body)
        assert model(kind).model_validate(body).model_dump(exclude_unset=True, by_alias=True) == body


def test_every_response_has_bodies_here():
    kinds = {name.removesuffix(".schema.json") for name in generate.MODELS if "_request." not in name}
    assert kinds == GOOD.keys() == BAD.keys()


@pytest.mark.parametrize(("kind", "body"), pairs(GOOD))
def test_a_body_that_is_sent_fits_and_is_carried_unchanged(kind, body):
    assert_fits(body, kind)


@pytest.mark.parametrize(("kind", "change"), pairs(BAD))
def test_a_body_that_no_caller_could_read_is_refused(kind, change):
    body = changed(GOOD[kind][0], *change)
    assert not schema(kind).is_valid(body)
    with pytest.raises(ValueError, match="validation error"):
        model(kind).model_validate(body)


@pytest.mark.parametrize("kind", GOOD)
def test_fields_to_come_are_allowed(kind):
    assert_fits({**GOOD[kind][0], "some_future_field": {"any": ["thing"]}}, kind)


@pytest.mark.parametrize("status", ERROR_TYPES)
def test_every_failure_is_told_in_one_form(status):
    body = Failure(status, "some_reason", "what happened", "prompt").body()
    assert_fits(body, "failure_response", "error_response")
    assert body["status_code"] == body["error"]["code"] == status
    assert body["error"] == {
        "message": "what happened",
        "type": ERROR_TYPES[status],
        "param": "prompt",
        "code": status,
        "reason": "some_reason",
    }
    assert ("detail" in body) == (status == 422)


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"temperature": "hot"}, ["body", "temperature"]),
        ({"prompt": [[1], [2, -4]]}, ["body", "prompt", 1, 1]),
        ({"logit_bias": {"5": "x"}}, ["body", "logit_bias", "5"]),
        ({"response_format": {"type": "xml"}}, ["body", "response_format", "type"]),
        ([1], ["body"]),
    ],
)
def test_a_breach_of_the_schema_is_told_in_both_documented_forms(body, loc):
    failure = check_body(body, "/v1/completions")
    told = failure.body()
    assert_fits(told, "failure_response", "error_response", "http_validation_error", "completion_http_validation_error")
    assert told["detail"] == [{"loc": loc, "msg": told["error"]["message"], "type": "schema"}]


@pytest.mark.engine
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True},
        {"logprobs": 1, "n": 2, "temperature": 1, "stop": ["."]},
        {"use_beam_search": True, "n": 2, "logprobs": 1},
    ],
)
def test_an_answer_of_the_engine_is_what_the_schema_says(complete, body):
    event = complete(**{"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0, **body})
    assert isinstance(event, Answered), event
    assert_fits(event.body, "completion_response")


@pytest.mark.engine
def test_a_chat_answer_of_the_engine_is_what_the_schema_says(engine):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    event = engine.submit(Request("chat", "/v1/chat/completions", json.dumps(body)), lane="batch").result(timeout=300)
    assert isinstance(event, Answered), event
    assert_fits(event.body, "chat_completion_response")
