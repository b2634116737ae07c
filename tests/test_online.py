"""The endpoint over the real engine, asked by the clients that people use. Answers are those of the batch door."""

import asyncio
import json
import math
import random
import time
from functools import cache

import httpx
import openai
import psutil
import pytest
from ray import serve

from pipelines import batch
from pipelines.model import EMBEDDED_NAME, resolve
from schemas.settings import EngineSettings, RunSettings
from tests.benchmarks.sides.work import WORDS
from tests.conftest import Run, Silence, write_lines
from tests.endpoint import BesideOthers, Endpoint, deploy, errors_of, events_of

pytestmark = pytest.mark.engine

# In float32, so that answers can be compared.
ENGINE = EngineSettings(dtype="float32", max_num_seqs=64, kv_cache_gib=1, cores=1)
NUM_PARITY = 200
REFUSED = (
    {"prompt": "a", "top_p": 7},
    {"prompt": "a", "model": "does-not-exist"},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a " * 9_000},
    {"prompt": "a", "structured_outputs": {"regex": "("}},
)
LONG = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def run(ray_cluster, tmp_path_factory) -> Run:
    """The same requests through the batch door, and some that it refuses; before the endpoint takes its cores."""
    folder = tmp_path_factory.mktemp("batch")
    lines = write_lines(folder / "in.jsonl", *draw_bodies(NUM_PARITY), *REFUSED)
    settings = RunSettings(inputs=(str(lines),), output=str(folder / "out"), engine=ENGINE, replicas=1, dedup=False)
    show = Silence()
    return Run(folder / "out", batch.run(settings, show, BesideOthers(ENGINE, str(folder))), show)


@pytest.fixture(scope="module")
def online(served_port, tmp_path_factory, request) -> Endpoint:
    if any("run" in item.fixturenames for item in request.session.items if item.module is request.module):
        request.getfixturevalue("run")
    start = BesideOthers(ENGINE, str(tmp_path_factory.mktemp("claims")))
    yield deploy("online", served_port, start, engine=ENGINE, replicas=1)
    serve.delete("online")


@pytest.fixture(scope="module")
def client(online) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{online.url}/v1", api_key="none", max_retries=0, timeout=120)


# --- the openai client ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "num_choices"),
    [
        ({}, 1),
        ({"max_tokens": 5, "temperature": 0, "logprobs": 3}, 1),
        ({"n": 3, "temperature": 0.8, "seed": 7, "top_p": 0.9}, 3),
        ({"echo": True, "max_tokens": 3}, 1),
        ({"stop": [",", "."], "frequency_penalty": 0.5, "presence_penalty": 0.1}, 1),
        ({"logit_bias": {"504": -100}, "user": "somebody", "temperature": 0}, 1),
        ({"extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "priority": 3}}, 1),
        ({"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, 1),
        ({"extra_body": {"stop_token_ids": [28], "min_tokens": 2, "return_token_ids": True, "session_id": "s"}}, 1),
        ({"n": 2, "temperature": 0, "extra_body": {"use_beam_search": True}}, 2),
    ],
)
def test_the_openai_client_completes(client, more, num_choices):
    answer = client.completions.create(model=EMBEDDED_NAME, prompt="The capital of France is", **more)
    assert len(answer.choices) == num_choices and answer.object == "text_completion"
    assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_openai_client_streams(client):
    body = {"model": EMBEDDED_NAME, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**body)
    *parts, last = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts].count(None) == len(parts) - 1
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert [model.id for model in client.models.list()] == [EMBEDDED_NAME]
    assert client.models.retrieve(EMBEDDED_NAME).id == EMBEDDED_NAME


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": 3}, openai.BadRequestError),
        ({"temperature": "hot"}, openai.UnprocessableEntityError),
        ({"prompt": "a " * 9_000}, openai.BadRequestError),
        ({"extra_headers": {"X-Request-Timeout": "0.001"}}, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_raises_what_it_means(client, more, kind, stream):
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": EMBEDDED_NAME, "prompt": "a", "stream": stream, **more})
    assert caught.value.body["message"] and caught.value.body["code"] == caught.value.status_code


def test_characters_of_several_tokens_come_whole(online):
    body = {"prompt": "Repeat: \U0001fae0 龜 ďábelské \U0001f468‍\U0001f469‍\U0001f467", "temperature": 0}
    for max_tokens in (2, 3, 64):
        whole = online.post({**body, "max_tokens": max_tokens}).json()["choices"][0]["text"]
        *parts, done = events_of(online.post({**body, "max_tokens": max_tokens, "stream": True}))
        texts = [json.loads(part)["choices"][0]["text"] for part in parts]
        assert "".join(texts) == whole and done == "[DONE]"
        assert "\ufffd" in whole or not any("\ufffd" in text for text in texts)


# --- both doors -------------------------------------------------------------------------------------------------------


def draw_bodies(number):
    """Varied requests whose answers are determined."""
    draw = random.Random(0)  # noqa: S311 - a test to repeat
    words = WORDS.split()
    variations = [
        lambda: {},
        lambda: {"logprobs": draw.randint(0, 5)},
        lambda: {"echo": True, "logprobs": 1},
        lambda: {"echo": True, "logprobs": 2, "max_tokens": 0},
        lambda: {"temperature": 1, "seed": draw.randint(0, 2**40), "n": draw.randint(1, 3)},
        lambda: {"temperature": 0.7, "seed": draw.randint(0, 2**40), "top_p": 0.8, "top_k": 20},
        lambda: {"stop": [" the", "\n"], "include_stop_str_in_output": draw.random() < 0.5},
        lambda: {"logit_bias": {str(draw.randint(0, 49_000)): draw.uniform(-5, 5)}, "frequency_penalty": 0.5},
        lambda: {"structured_outputs": {"choice": draw.sample(words, 3)}},
        lambda: {"response_format": {"type": "json_object"}, "max_tokens": 20},
        lambda: {"use_beam_search": True, "n": 2, "max_tokens": 5},
        lambda: {"prompt": [" ".join(draw.choices(words, k=3)) for _ in range(3)]},
        lambda: {"prompt": [draw.randint(100, 40_000) for _ in range(20)], "return_token_ids": True},
        lambda: {"prompt_logprobs": 1, "min_tokens": 3, "ignore_eos": True},
        lambda: {"truncate_prompt_tokens": 4, "repetition_penalty": 1.2},
    ]
    for index in range(number):
        prompt = f"{index}: " + " ".join(draw.choices(words, k=draw.randint(2, 60)))
        body = {"prompt": prompt, "max_tokens": draw.randint(1, 16), "temperature": 0, "request_id": f"row {index}"}
        yield body | variations[index % len(variations)]()


def without_chance(body):
    """A body without what differs from one time to the next."""
    usage = {name: value for name, value in body["usage"].items() if name != "prompt_tokens_details"}
    return {**{name: value for name, value in body.items() if name not in ("id", "created", "metrics")}, "usage": usage}


@pytest.mark.slow
def test_both_doors_give_the_same_answers(online, run):
    bodies = list(draw_bodies(NUM_PARITY))
    rows = {row["id"]: json.loads(row["response"]) for row in run.table("responses").to_pylist()}

    async def send_all():
        async with httpx.AsyncClient(timeout=600) as http:
            return await asyncio.gather(*(http.post(f"{online.url}/v1/completions", json=body) for body in bodies))

    for body, response in zip(bodies, asyncio.run(send_all()), strict=True):
        assert response.status_code == 200, response.text
        assert without_chance(response.json()) == without_chance(rows[body["request_id"]]), body


@pytest.mark.slow
def test_a_row_and_a_response_fail_alike(online, run):
    rows = run.table("errors").sort_by("source_line").to_pylist()
    for body, row in zip(REFUSED, rows, strict=True):
        error = online.post(body).json()["error"]
        told = (error["code"], error["type"], error["reason"], error["param"])
        assert told == (row["status_code"], row["type"], row["reason"], row["param"])
        assert row["message"].endswith(error["message"])


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {},
        pytest.param({"stream": True, "n": 4, "temperature": 1}, marks=pytest.mark.slow),
        pytest.param({"n": 4, "temperature": 1}, marks=pytest.mark.slow),
        {"use_beam_search": True, "n": 4, "max_tokens": 2_000},
    ],
)
def test_a_client_that_goes_away_frees_the_engine_and_others_go_on(online, more):
    other = {"prompt": "The capital of France is", "max_tokens": 120, "ignore_eos": True, "temperature": 0}

    async def go_away():
        async with httpx.AsyncClient(timeout=300) as http:
            url = f"{online.url}/v1/completions"
            leaving = asyncio.create_task(http.post(url, json=LONG | more))
            while not await asyncio.to_thread(online.num_running):
                await asyncio.sleep(0.05)
            staying = asyncio.create_task(http.post(url, json=other))
            await asyncio.sleep(0.5)
            leaving.cancel()
            left = time.monotonic()
            while await asyncio.to_thread(online.num_running) > 1:
                await asyncio.sleep(0.05)
            return time.monotonic() - left, await staying

    seconds, stayed = asyncio.run(go_away())
    assert seconds < 2
    assert stayed.json()["usage"]["completion_tokens"] == 120
    online.wait_until_idle(2)


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"n": 3, "temperature": 1}, marks=pytest.mark.slow), {"use_beam_search": True, "n": 3}],
)
def test_a_deadline_frees_the_engine_and_is_no_clients_fault(online, more):
    late = online.post(LONG | {"max_tokens": 2_000} | more, X_Request_Timeout="1.5")
    assert errors_of(late) == (504, "deadline_exceeded", None)
    online.wait_until_idle(2)


@cache
def reference():
    """transformers' model and tokenizer, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve(None).path
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def token_logprobs(text):
    """Of each token of a text after the first, by transformers."""
    import torch

    model, tokenizer = reference()
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        scores = model(ids).logits.log_softmax(-1)
    return scores[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1).tolist()


def log_likelihood(context, continuation):
    """Of a continuation after its context, by transformers."""
    num_context = len(reference()[1](context).input_ids)
    return math.fsum(token_logprobs(context + continuation)[num_context - 1 :])


def test_log_likelihoods_are_those_of_transformers(online):
    for text in ("The cat sat on the mat.", "Paris is the capital of France, and Rome that of Italy."):
        sent = online.post({"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0})
        first, *told = sent.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert first is None and told == pytest.approx(token_logprobs(text), abs=2e-3)


@pytest.mark.slow
def test_an_evaluation_harness_runs(online, tmp_path, monkeypatch):
    """lm_eval's `local-completions`: likelihoods, equal to those of transformers, and answers."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"question": "The capital of France is", "choices": ["Paris", "a red stone"], "answer": 0},
        {"question": "Two and two make", "choices": ["a garden wall", "four"], "answer": 1},
        {"question": "At night one sees the", "choices": ["moon", "invoice"], "answer": 0},
    ]
    data = write_lines(tmp_path / "rows.jsonl", *rows)
    shared = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    (tmp_path / "likely.yaml").write_text(
        f"task: likely\n{shared}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "said.yaml").write_text(
        f"task: said\n{shared}output_type: generate_until\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_target: '{{choices[answer]}}'\ngeneration_kwargs: {until: ['.'], max_gen_toks: 8}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    path = resolve(None).path
    told = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": EMBEDDED_NAME,
            "base_url": f"{online.url}/v1/completions",
            "tokenizer": path,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_length": 512,
        },
        tasks=["likely", "said"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    found = [answer for sample in told["samples"]["likely"] for ((answer, _),) in sample["resps"]]
    expected = [log_likelihood(row["question"], f" {choice}") for row in rows for choice in row["choices"]]
    assert [float(one) for one in found] == pytest.approx(expected, abs=1e-2)
    assert told["results"]["likely"]["acc,none"] == 1
    assert all(sample["resps"][0][0] for sample in told["samples"]["said"])


# Last: it takes the engine away.
@pytest.mark.slow
def test_an_engine_that_is_killed_in_a_stream_is_replaced(online, client):
    stream = client.completions.create(
        model=EMBEDDED_NAME, prompt="Once", max_tokens=4_000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(10):
        assert next(stream).choices[0].finish_reason is None
    (core,) = online.engine_cores()
    core.kill()
    with pytest.raises(openai.APIError) as caught:
        for part in stream:
            assert part.choices[0].finish_reason is None
    assert caught.value.body["reason"] == "engine_died" and caught.value.body["code"] == 503
    response = online.post({"prompt": "a"})
    assert response.status_code == 503 and response.headers["retry-after"]
    assert online.get("/health").status_code == 503
    until = time.monotonic() + 400
    while online.get("/health").status_code != 200 and time.monotonic() < until:
        time.sleep(0.5)
    answer = online.post({"prompt": "The capital of France is", "temperature": 0}, timeout=120)
    assert answer.json()["choices"][0]["text"].startswith(" Paris")
    assert not psutil.pid_exists(core.pid) or core.status() == psutil.STATUS_ZOMBIE
