"""Chats over the real engine: the published examples, tools, forms of answers, and one text by every way."""

import json
import subprocess

import jsonschema
import openai
import pytest
from ray import serve

from pipelines import batch
from schemas.settings import EngineSettings, RunSettings
from tests.conftest import Run, Silence, write_lines
from tests.endpoint import BesideOthers, Endpoint, deploy, events_of
from tests.models import with_template

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = "Pi-3.1"
ENGINE = EngineSettings(dtype="float32", max_num_seqs=16, kv_cache_gib=1, cores=1, tool_parser="hermes")
CHAT, EXTERNAL = "/v1/chat/completions", "/external/api/inference/openai/v1/chat/completions"
LEGACY, STREAMING = "/external/api/inference", "/external/api/inference/streaming"

# What the published description sends.
EXAMPLE = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the weather like today?"},
    ],
    "temperature": 0.7,
    "max_tokens": 150,
    "top_p": 0.9,
}
LEGACY_EXAMPLE = {
    "config": MODEL,
    "context": [
        {"type": "Instruction", "text": "You are a helpful assistant."},
        {"type": "Human", "text": "What is the weather like today?"},
    ],
    "temperature": 0.7,
    "max_tokens": 150,
    "web_search": False,
}

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED = {"role": "user", "content": "What is the weather in Paris?"}


def turn(city, weather, number):
    """A question, its call, the tool's answer, and the answer."""
    call = {"id": f"call_{number}", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": weather},
        {"role": "assistant", "content": f"It is {weather} in {city}."},
    ]


# From examples a model of this size learns how a call is written.
SHOTS = turn("Rome", "sunny", 1) + turn("Oslo", "rainy", 2)

CONVERSATION = ["What is the capital of France?", "It is Paris.", "And of Italy?"]
SAID = {"temperature": 0, "max_tokens": 24}
AS_MESSAGES = {
    "messages": [
        {"role": "user" if number % 2 == 0 else "assistant", "content": text}
        for number, text in enumerate(CONVERSATION)
    ],
    **SAID,
}
AS_TURNS = {
    "context": [{"type": "AI" if number % 2 else "Human", "text": text} for number, text in enumerate(CONVERSATION)],
    **SAID,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(with_template(tmp_path_factory.mktemp("model") / "tools"))


@pytest.fixture(scope="module")
def run(ray_cluster, model, tmp_path_factory) -> Run:
    """The same conversation through the batch door, before the endpoint takes its core."""
    folder = tmp_path_factory.mktemp("batch")
    external = {"custom_id": "external", "method": "POST", "url": EXTERNAL, "body": AS_MESSAGES}
    lines = [{"custom_id": "chat", **AS_MESSAGES}, {"custom_id": "legacy", **AS_TURNS}, external]
    lines.append({"custom_id": "wrong", "context": [], **SAID})
    inputs = write_lines(folder / "in.jsonl", *lines)
    settings = RunSettings(
        inputs=(str(inputs),), output=str(folder / "out"), model=model, served_names=(MODEL,), engine=ENGINE, replicas=1
    )
    show = Silence()
    return Run(folder / "out", batch.run(settings, show, start(model, str(folder))), show)


def start(model, folder):
    return BesideOthers(ENGINE, folder, model, (MODEL,))


@pytest.fixture(scope="module")
def online(served_port, model, tmp_path_factory, request) -> Endpoint:
    if any("run" in item.fixturenames for item in request.session.items if item.module is request.module):
        request.getfixturevalue("run")
    claims = str(tmp_path_factory.mktemp("claims"))
    yield deploy(
        "talks", served_port, start(model, claims), model=model, served_names=(MODEL,), engine=ENGINE, replicas=1
    )
    serve.delete("talks")


@pytest.fixture(scope="module")
def client(online) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=online.url + EXTERNAL.removesuffix("/chat/completions"), api_key="none", max_retries=0, timeout=120
    )


def curl(url, body, *more):
    """What a shell gets, status and all."""
    command = ["curl", "--silent", "--show-error", "--url", url, "-X", "POST", "-H", "Content-Type: application/json"]
    command += ["-H", "Authorization: Bearer YOUR_API_KEY", "-d", json.dumps(body), *more]
    command += ["--write-out", "\n%{http_code}"]
    text, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition("\n")
    assert status == "200", text
    return text


# --- the published examples -------------------------------------------------------------------------------------------


def test_the_published_chat_is_answered_as_its_example_is(online, client):
    answer = json.loads(curl(online.url + EXTERNAL, EXAMPLE))
    assert answer["object"] == "chat.completion" and answer["model"] == MODEL and answer["id"]
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    answer = client.chat.completions.create(**EXAMPLE)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")


def test_the_published_chat_streams_as_its_example_does(online, client):
    blocks = curl(online.url + EXTERNAL, {**EXAMPLE, "stream": True}, "--no-buffer").split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if block]
    assert data.pop() == "[DONE]"
    chunks = [json.loads(one) for one in data]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["delta"]["role"] == "assistant" and [one["finish_reason"] for one in deltas].count(None) > 1
    assert deltas[-1]["finish_reason"] in ("stop", "length")
    with client.chat.completions.create(**EXAMPLE, stream=True) as parts:
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def test_stream_options_mean_the_usage_unless_they_say_otherwise(online):
    body = {**EXAMPLE, "max_tokens": 3, "stream": True}
    for options, has_usage in (({}, True), ({"include_usage": False}, False), (None, False)):
        events = events_of(online.post({**body, "stream_options": options}, path=EXTERNAL))
        last = json.loads(events[-2])
        assert (last.get("usage") is not None) == has_usage, options
        assert ("time_info" in last) == has_usage


def test_the_published_legacy_chat_is_answered_as_its_example_is(online):
    answer = json.loads(curl(online.url + LEGACY, LEGACY_EXAMPLE))
    assert answer.keys() == {"created", "text"} and answer["text"]
    blocks = curl(online.url + STREAMING, LEGACY_EXAMPLE, "--no-buffer").split("\n\n")
    events = [json.loads(block.removeprefix("data: ")) for block in blocks if block]
    assert [event["idx"] for event in events] == list(range(len(events))) and len(events) > 1
    assert all(event.keys() == {"created", "idx", "text", "tool_calls"} for event in events)


# --- tools and forms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_asked_for_keeps_to_its_schema(client, choice):
    answer = client.chat.completions.create(
        model=MODEL, messages=[ASKED], tools=[TOOL], tool_choice=choice, max_tokens=60, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.id and call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_a_call_streams_in_pieces(client):
    parts = client.chat.completions.create(
        model=MODEL, messages=[ASKED], tools=[TOOL], tool_choice=NAMED, max_tokens=60, temperature=0, stream=True
    )
    deltas = [call for part in parts if part.choices for call in part.choices[0].delta.tool_calls or ()]
    assert len(deltas) > 2 and deltas[0].id and deltas[0].function.name == "get_weather"
    jsonschema.validate(json.loads("".join(delta.function.arguments or "" for delta in deltas)), CITY)


def test_a_model_calls_by_itself_and_goes_on_from_the_answer(online):
    body = {"messages": [*SHOTS, ASKED], "tools": [TOOL], "max_tokens": 60, "temperature": 0}
    answer = online.post(body, path=CHAT).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    told = {"role": "tool", "tool_call_id": call["id"], "content": "snowy"}
    body["messages"] += [{"role": "assistant", "tool_calls": [call]}, told]
    assert online.post(body, path=CHAT).json()["choices"][0]["message"]["content"] == "It is snowy in Paris."
    # The other path calls no tool unless it is asked to.
    body["messages"] = [*SHOTS, ASKED]
    answer = online.post(body, path=EXTERNAL).json()["choices"][0]
    assert not answer["message"].get("tool_calls") and "Paris" in answer["message"]["content"]


def test_a_legacy_chat_calls_tools_too(online):
    kinds = {"user": "Human", "assistant": "AI", "tool": "Tool"}
    turns = [
        {"type": kinds[message["role"]], "text": message["content"]}
        | {name: message[name] for name in ("tool_calls", "tool_call_id") if name in message}
        for message in [*SHOTS, ASKED]
    ]
    body = {"context": turns, "tools": [TOOL], "max_tokens": 60, "temperature": 0}
    answer = online.post(body, path=LEGACY).json()
    assert [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]] == [{"city": "Paris"}]
    last = json.loads(events_of(online.post(body, path=STREAMING))[-1])
    assert [call["function"]["name"] for call in last["tool_calls"]] == ["get_weather"]
    assert json.loads(last["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize("path", [CHAT, EXTERNAL, LEGACY])
def test_an_answer_keeps_to_a_json_schema(online, path):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    told = {"context": [{"type": "Human", "text": ASKED["content"]}]} if path == LEGACY else {"messages": [ASKED]}
    answer = online.post({**told, "response_format": form, "max_tokens": 60, "temperature": 0}, path=path).json()
    text = answer["text"] if path == LEGACY else answer["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), CITY)


def test_a_form_that_no_grammar_has_is_refused_before_the_engine(online):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    response = online.post({"messages": [ASKED], "tools": [bad], "tool_choice": "required"}, path=CHAT)
    assert response.status_code == 400 and response.json()["error"]["reason"] == "bad_constraint"


# --- one conversation by every way ------------------------------------------------------------------------------------


def test_one_conversation_has_one_answer_by_every_way(online, run):
    texts = {
        path: online.post(AS_MESSAGES, path=path).json()["choices"][0]["message"]["content"]
        for path in (CHAT, EXTERNAL)
    }
    legacy = {**AS_TURNS, "web_search": False}
    texts[LEGACY] = online.post(legacy, path=LEGACY).json()["text"]
    texts[STREAMING] = "".join(json.loads(one)["text"] for one in events_of(online.post(legacy, path=STREAMING)))
    texts |= {row["id"]: row["text"][0] for row in run.table("responses").to_pylist()}
    assert texts.keys() == {CHAT, EXTERNAL, LEGACY, STREAMING, "chat", "legacy", "external"}
    assert len(set(texts.values())) == 1 and "Rome" in texts[CHAT], texts


def test_rows_of_every_kind_sit_in_the_same_tables(run):
    rows = {row["id"]: row for row in run.table("responses").to_pylist()}
    assert json.loads(rows["legacy"]["response"]).keys() == {"created", "text"}
    assert rows["legacy"]["endpoint"] == LEGACY and rows["legacy"]["model"] == MODEL
    assert rows["legacy"]["finish_reason"] == rows["chat"]["finish_reason"] == ["stop"]
    assert "time_info" in json.loads(rows["external"]["response"])
    usage = {row["id"]: row for row in run.table("usage").to_pylist()}
    assert usage["legacy"]["prompt_tokens"] == usage["chat"]["prompt_tokens"] > 0
    assert usage["legacy"]["completion_tokens"] == usage["chat"]["completion_tokens"] > 0
    (wrong,) = run.table("errors").to_pylist()
    assert (wrong["id"], wrong["param"], wrong["reason"]) == ("wrong", "context", "empty_prompt")
    assert json.loads(rows["legacy"]["request"]) == AS_TURNS
