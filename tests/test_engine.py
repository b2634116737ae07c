"""The seam over the real engine: answers, failures that touch nobody else, deadlines, and nothing left behind."""

import asyncio
import json
import math
import pickle
import time

import pytest

from pipelines.model import resolve
from pipelines.outcomes import conclude
from pipelines.vllm_engine import EngineStart, VllmEngine
from schemas.failures import EngineUnusable
from schemas.requests import Answered, Failed, Request
from schemas.settings import EngineSettings
from tests.conftest import engine_processes

pytestmark = pytest.mark.engine


def text(event):
    assert isinstance(event, Answered), event
    return [choice["text"] for choice in event.body["choices"]]


def on_loop(engine, work, timeout=120):
    return asyncio.run_coroutine_threadsafe(work, engine.loop).result(timeout=timeout)


def test_a_completion_is_a_real_models_answer(complete):
    event = complete(prompt="The capital of France is", temperature=0)
    assert text(event)[0].startswith(" Paris")
    assert event.body["object"] == "text_completion" and event.body["model"] == "smollm2-135m-instruct"
    assert event.usage["prompt_tokens"] == 5 and event.usage["completion_tokens"] == 16
    assert event.body["choices"][0]["finish_reason"] == "length"
    assert "metrics" not in event.body
    assert event.timing.total_ms >= event.timing.first_token_ms > 0 <= event.timing.queue_ms


def test_a_body_is_json_without_surprises(complete):
    event = complete(prompt="é", max_tokens=3, logprobs=2, echo=True, temperature=0)
    assert json.loads(json.dumps(event.body, allow_nan=False)) == event.body


def test_prompts_come_in_every_form_of_the_schema(complete):
    ids = [504, 3575, 282, 4649, 314]
    as_text = text(complete(prompt="The capital of France is", max_tokens=4, temperature=0))
    assert text(complete(prompt=ids, max_tokens=4, temperature=0)) == as_text
    both = complete(prompt=[ids, [504, 1073, 314]], max_tokens=4, temperature=0)
    assert len(text(both)) == 2 and text(both)[0] == as_text[0]
    assert both.usage["prompt_tokens"] == 8
    assert text(complete(prompt=["The capital of France is"], max_tokens=4, temperature=0)) == as_text


def test_a_chat_is_answered_with_the_models_own_template(engine):
    def chat(**body):
        request = Request("chat", "/v1/chat/completions", json.dumps(body))
        return engine.submit(request, lane="batch").result(timeout=300)

    parts = [{"type": "text", "text": "What is the capital of France?"}]
    plain, in_parts = (
        chat(messages=[{"role": "user", "content": content}], max_tokens=24, temperature=0)
        for content in (parts[0]["text"], parts)
    )
    assert "Paris" in plain.body["choices"][0]["message"]["content"]
    assert plain.body["object"] == "chat.completion" and "metrics" not in plain.body
    assert in_parts.body["choices"] == plain.body["choices"]
    row = {"source_file": "f", "source_line": 1, "endpoint": "/v1/chat/completions", "request": '{"messages": []}'}
    row |= {"is_repeated": False, "num_prompt_tokens": 9, "num_output_tokens": 24}
    outcome, tally = conclude(row, plain, "r", 1)
    assert outcome["text"] == [plain.body["choices"][0]["message"]["content"]] and tally.num_cut_by_default == 0
    failed = chat(messages=[{"role": "user", "content": "a " * 9_000}])
    assert isinstance(failed, Failed) and failed.failure.status_code == 400
    template = chat(messages=[{"role": "user", "content": "a"}], chat_template="{{ 1 }}")
    assert isinstance(template, Failed) and "template" in template.failure.message.lower()


def test_beams_are_as_many_as_n_and_the_best_comes_first(complete):
    event = complete(prompt="The capital of Italy is", use_beam_search=True, n=3, max_tokens=6, temperature=0)
    assert len(set(text(event))) == 3 and text(event)[0].startswith(" Rome")


def test_echo_with_logprobs_scores_a_text(complete):
    def score(sentence):
        event = complete(prompt=sentence, echo=True, logprobs=1, max_tokens=0, temperature=0)
        first, *rest = event.body["choices"][0]["logprobs"]["token_logprobs"]
        assert first is None and text(event) == [sentence]
        # The engine generates a token all the same; nobody asked for it, and nobody pays.
        assert event.usage["completion_tokens"] == 0 and event.usage["total_tokens"] == event.usage["prompt_tokens"]
        return math.fsum(rest)

    assert score("The cat sat on the mat.") > score("Cat the mat sat on the.")


def test_structured_outputs_obey_their_schema(complete):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    event = complete(prompt="JSON:", structured_outputs={"json": schema}, max_tokens=40, temperature=0)
    assert isinstance(json.loads(text(event)[0])["n"], int)
    assert text(complete(prompt="Yes or no?", structured_outputs={"choice": ["yes", "no"]}))[0] in {"yes", "no"}


def test_seeds_and_stops_are_honoured_and_priorities_taken(complete):
    sampled = [text(complete(prompt="Once", temperature=1, seed=5, max_tokens=12)) for _ in range(2)]
    assert sampled[0] == sampled[1]
    stopped = complete(prompt="Count: one, two, three,", stop=[" six"], max_tokens=32, temperature=0)
    assert " six" not in text(stopped)[0] and stopped.body["choices"][0]["finish_reason"] == "stop"
    assert isinstance(complete(prompt="hi", priority=-7, n=3, temperature=1, max_tokens=4), Answered)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "a", "model": "nobody"}, 404, "model"),
        ({"prompt": "a " * 9_000}, 400, "input_tokens"),
        ({"prompt": [10**9]}, 400, None),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "logprobs": 10_000}, 400, "logprobs"),
        ({"prompt": "a", "n": 0}, 400, None),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400, None),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ],
)
def test_a_request_that_cannot_be_served_is_its_own_failure(complete, body, status, param):
    event = complete(**body)
    assert isinstance(event, Failed), event
    assert (event.failure.status_code, event.failure.param) == (status, param)
    assert event.failure.message and "Traceback" not in event.failure.message


def test_a_chats_time_limit_means_nothing_to_a_completion(complete):
    """Its schema doesn't know the field, so whatever stands there passes the checks."""
    for value in ("soon", -1, [2]):
        assert isinstance(complete(prompt="a", max_tokens=1, timeout_sec=value), Answered)


def test_bad_neighbours_change_nobodys_answer(engine):
    good = [{"prompt": f"Story {n}: Once upon a time", "max_tokens": 12, "temperature": 0} for n in range(8)]
    bad = [{"prompt": "a " * 9_000}, {"prompt": [10**9]}, {"prompt": ""}, {"prompt": "a", "model": "nobody"}]

    def answers(bodies):
        sent = [engine.submit(Request("r", "/v1/completions", json.dumps(body)), lane="batch") for body in bodies]
        return [future.result(timeout=300) for future in sent]

    alone = [text(event) for event in answers(good)]
    mixed = answers([body for pair in zip(good, bad * 2, strict=True) for body in pair])
    assert [text(event) for event in mixed[::2]] == alone
    assert all(isinstance(event, Failed) for event in mixed[1::2])


def test_equal_ids_do_not_meet_in_the_engine(engine):
    bodies = [
        {"prompt": prompt, "request_id": "same", "max_tokens": 4, "temperature": 0} for prompt in ("1, 2,", "a, b,")
    ]
    sent = [engine.submit(Request("same", "/v1/completions", json.dumps(body)), lane="batch") for body in bodies]
    numbers, letters = (text(future.result(timeout=300))[0] for future in sent)
    assert any(digit in numbers for digit in "345") and any(letter in letters for letter in "cde")


def test_a_request_past_its_deadline_fails_as_such_and_leaves_the_engine_free(engine):
    body = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True}

    async def events():
        request = Request("late", "/v1/completions", json.dumps(body))
        return [event async for event in engine.generate(request, lane="batch", deadline=time.time() + 1)]

    (event,) = on_loop(engine, events())
    assert isinstance(event, Failed) and (event.failure.status_code, event.failure.reason) == (504, "deadline_exceeded")
    wait_until_idle(engine)


def test_a_request_whose_caller_goes_away_leaves_the_engine_free(engine):
    body = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True}
    future = engine.submit(Request("gone", "/v1/completions", json.dumps(body)), lane="batch")
    time.sleep(1)
    assert future.cancel()
    wait_until_idle(engine)


def wait_until_idle(engine, seconds=5.0):
    until = time.monotonic() + seconds
    while engine._llm.get_num_unfinished_requests() and time.monotonic() < until:
        time.sleep(0.05)
    assert engine._llm.get_num_unfinished_requests() == 0


def test_a_late_row_of_lower_priority_goes_before_those_that_wait(engine):
    done = []

    def send(name, priority):
        body = {"prompt": f"{name}:", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "priority": priority}
        future = engine.submit(Request(name, "/v1/completions", json.dumps(body)), lane="batch")
        future.add_done_callback(lambda _: done.append(name))
        return future

    waiting = [send(f"row {number}", 0) for number in range(200)]
    # Choices of one prompt share its priority.
    several = {"prompt": "hi", "max_tokens": 8, "n": 3, "temperature": 1, "priority": 5}
    last = engine.submit(Request("last", "/v1/completions", json.dumps(several)), lane="batch")
    urgent = send("urgent", -5)
    for future in [*waiting, last, urgent]:
        assert isinstance(future.result(timeout=300), Answered)
    assert len(last.result().body["choices"]) == 3
    # 68 entered before it came.
    assert done.index("urgent") < 130


@pytest.mark.slow
def test_rows_of_all_priorities_finish_though_the_cache_is_nearly_full(engine):
    words = " ".join(f"word{number}" for number in range(180))
    bodies = [
        {
            "prompt": f"{number} {words}",
            "max_tokens": 200,
            "ignore_eos": True,
            "n": 1 + number % 3,
            "priority": number % 7 - 3,
        }
        for number in range(40)
    ]
    sent = [engine.submit(Request("r", "/v1/completions", json.dumps(body)), lane="batch") for body in bodies]
    for body, future in zip(bodies, sent, strict=True):
        event = future.result(timeout=800)
        assert isinstance(event, Answered) and event.usage["completion_tokens"] == 200 * body["n"]


def test_an_engine_whose_process_dies_fails_what_is_in_flight_and_starts_again(engine):
    body = {"prompt": "Once", "max_tokens": 4_000, "ignore_eos": True}
    beams = {**body, "use_beam_search": True, "n": 2}
    sent = [engine.submit(Request("r", "/v1/completions", json.dumps(one)), lane="batch") for one in (body, beams)]
    time.sleep(1)
    (core,) = [process for process in engine_processes() if "EngineCore" in process.name()]
    core.kill()
    died = time.monotonic()
    for future in sent:
        with pytest.raises(EngineUnusable, match="died"):
            future.result(timeout=10)
    assert time.monotonic() - died < 10
    with pytest.raises(EngineUnusable):
        engine.submit(Request("r", "/v1/completions", json.dumps(body)), lane="batch").result(timeout=10)
    engine.restart()
    again = Request("r", "/v1/completions", json.dumps({"prompt": "The capital of France is", "temperature": 0}))
    assert text(engine.submit(again, lane="batch").result(timeout=60))[0].startswith(" Paris")


def test_log_probabilities_of_given_tokens_spoil_nobodys(engine):
    """vLLM computes one kind of log-probabilities for all of a step."""
    bodies = [
        {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6, "logprobs": 3},
        {
            "prompt": "The capital of Italy is",
            "temperature": 0,
            "max_tokens": 6,
            "logprobs": 1,
            "logprob_token_ids": [5],
        },
        {"prompt": "The capital of Spain is", "max_tokens": 6, "use_beam_search": True, "n": 2, "logprobs": 2},
    ]

    def send(body):
        return engine.submit(Request("r", "/v1/completions", json.dumps(body)), lane="batch")

    def told(event):
        return [(choice["text"], choice["logprobs"]["tokens"]) for choice in event.body["choices"]]

    alone = [told(send(body).result(timeout=60)) for body in bodies]
    together = [future.result(timeout=60) for future in [send(body) for body in bodies * 2]]
    assert [told(event) for event in together] == alone * 2
    for event in together:
        for choice in event.body["choices"]:
            assert min(choice["logprobs"]["token_logprobs"]) > -50
            assert all(min(top.values()) > -50 for top in choice["logprobs"]["top_logprobs"])


def test_an_engine_that_cannot_start_says_why_on_one_line(own_core_claims):
    with pytest.raises(EngineUnusable, match=r"the engine didn't start: .*max_model_len") as caught:
        VllmEngine.start(resolve(None), (), EngineSettings(max_model_len=10**8, cores=1))
    assert "\n" not in caught.value.reason


def test_starting_is_light_to_send():
    start = EngineStart(None, ("a",), EngineSettings(), 1, 2, {"b": "/folder"})
    assert pickle.loads(pickle.dumps(start)) == start  # noqa: S301 - our own bytes
