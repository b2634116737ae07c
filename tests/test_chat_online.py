"""The chat routes, as their clients see them, over the deterministic engine; see test_chats.py for the real one."""

import json

import pytest
from ray import serve

from schemas.settings import Bounds, EngineSettings
from tests.deterministic import Starts
from tests.endpoint import Endpoint, deploy, errors_of, events_of

CHAT, EXTERNAL = "/v1/chat/completions", "/external/api/inference/openai/v1/chat/completions"
LEGACY, STREAMING = "/external/api/inference", "/external/api/inference/streaming"
BODY = {"messages": [{"role": "user", "content": "one two three"}]}
TURNS = {"context": [{"type": "Human", "text": "one two three"}]}

FAILING = {"context": [{"type": "Human", "text": "fail"}], "web_search": False}


@pytest.fixture(scope="module")
def endpoint(served_port) -> Endpoint:
    yield deploy(
        "chats",
        served_port,
        Starts(),
        served_names=("test",),
        engine=EngineSettings(cores=1),
        replicas=1,
        bounds=Bounds(max_output_tokens=4_000),
        web_search="tests.test_web_search:find_briefly",
    )
    serve.delete("chats")


@pytest.mark.parametrize("path", [CHAT, EXTERNAL])
def test_a_chat_is_answered_whole_or_in_parts(endpoint, path):
    whole = endpoint.post(BODY, path=path).json()
    assert whole["choices"][0]["message"]["content"] == "three two one"
    assert ("time_info" in whole) == (path == EXTERNAL)
    # How long its answer may be was for the endpoint to say.
    assert json.loads(whole["received"])["max_tokens"] == 4_000
    parts = events_of(endpoint.post({**BODY, "stream": True, "stream_options": {"include_usage": True}}, path=path))
    assert parts.pop() == "[DONE]"
    chunks = [json.loads(part) for part in parts]
    assert chunks[-1]["choices"] == [] and ("time_info" in chunks[-1]) == (path == EXTERNAL)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]) == "three two one"


def test_a_chat_that_leaves_little_of_the_context_goes_on_to_its_end(endpoint):
    body = {"messages": [{"role": "user", "content": "a " * 5_000}]}
    assert "max_tokens" not in json.loads(endpoint.post(body, path=CHAT).json()["received"])


def test_a_legacy_chat_is_answered_whole_or_in_parts(endpoint):
    whole = endpoint.post(TURNS, path=f"{LEGACY}?origin_endpoint=elsewhere")
    assert whole.headers["x-web-search"] == "done"
    assert whole.json().keys() == {"created", "text"} and whole.json()["text"].startswith("three two one")
    response = endpoint.post({**TURNS, "web_search": False}, path=STREAMING)
    assert response.headers["x-web-search"] == "off"
    parts = [json.loads(part) for part in events_of(response)]
    assert [part["idx"] for part in parts] == [0, 1, 2] and all(part["tool_calls"] is None for part in parts)
    assert "".join(part["text"] for part in parts) == "three two one"


def test_what_was_found_reaches_the_engine(endpoint):
    text = endpoint.post(TURNS, path=LEGACY).json()["text"]
    assert text.startswith("three two one") and "woof" in text
    # An answer that is longer than the context with what was found is given without it.
    long = {"context": [{"type": "Human", "text": "a " * 4_150}], "max_tokens": 4_000}
    response = endpoint.post(long, path=LEGACY)
    assert response.status_code == 200, response.text
    assert response.headers["x-web-search"] == "too-long"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"messages": []}, (400, "empty_prompt", "messages")),
        (CHAT, {}, (422, "schema", None)),
        (EXTERNAL, {**BODY, "model": "Pi-3.1"}, (404, "unknown_model", "model")),
        (EXTERNAL, {**BODY, "chat_template": "{{ 1 }}"}, (400, "feature_off", "chat_template")),
        (LEGACY, {**TURNS, "config": "Pi-3.1"}, (404, "unknown_model", "config")),
        (LEGACY, {"context": [{"type": "Robot", "text": "a"}]}, (422, "schema", "context[0].type")),
        (LEGACY, {"context": [{"type": "Human", "text": "a " * 9_000}]}, (400, "prompt_too_long", "context")),
        (
            LEGACY,
            {"context": [{"type": "Human", "text": "fail"}], "web_search": False},
            (400, "asked_to_fail", "prompt"),
        ),
        (
            STREAMING,
            {"context": [{"type": "Human", "text": "fail"}], "web_search": False},
            (400, "asked_to_fail", "prompt"),
        ),
    ],
)
def test_errors_come_in_the_bodys_own_words(endpoint, path, body, expected):
    assert errors_of(endpoint.post(body, path=path)) == expected


def test_a_legacy_stream_that_breaks_says_so_once(endpoint):
    body = {"context": [{"type": "Human", "text": "break b c"}], "web_search": False}
    parts = [json.loads(part) for part in events_of(endpoint.post(body, path=STREAMING))]
    assert [part["text"] for part in parts[:-1]] == ["c"]
    assert parts[-1]["error"]["reason"] == "asked_to_break"
