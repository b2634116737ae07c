"""Beam search on the real engine: what a request says is honoured, and the answers are those of other searches."""

import asyncio
import json
import math
import time
from dataclasses import replace

import pytest

from pipelines import beam_rows
from pipelines.model import resolve
from schemas.requests import Answered, Failed, Request
from tests.test_engine import on_loop, wait_until_idle

pytestmark = pytest.mark.engine

FRANCE = [504, 3575, 282, 4649, 314]
COUNT = "one, two, three,"


@pytest.fixture
def beams(complete):
    def send(**body):
        event = complete(**{"use_beam_search": True, "n": 4, "max_tokens": 12, "temperature": 0, **body})
        assert isinstance(event, Answered), event
        return event.body

    return send


def texts(body):
    return [choice["text"] for choice in body["choices"]]


def test_choices_are_scored_and_sorted_and_what_was_asked_for_is_billed(beams):
    body = beams(prompt="The capital of France is", return_token_ids=True)
    choices, usage = body["choices"], body["usage"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3] and len(set(texts(body))) == 4
    scores = [choice["score"] for choice in choices]
    assert scores == sorted(scores, reverse=True)
    for choice in choices:
        # The prompt's five tokens count in the length; a token that ends an answer doesn't.
        length = 5 + len(choice["token_ids"]) - (choice["finish_reason"] == "stop")
        assert choice["score"] == pytest.approx(choice["cumulative_logprob"] / length)
    assert usage["prompt_tokens"] == 5
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    assert usage["search_tokens"] >= usage["completion_tokens"] / 4


def test_a_stop_text_ends_a_beam(beams):
    body = beams(prompt=COUNT, stop=[" six"], max_tokens=32)
    assert all(choice["finish_reason"] == "stop" for choice in body["choices"])
    assert " four, five," in texts(body) and not any(" six" in text for text in texts(body))
    assert {choice["stop_reason"] for choice in body["choices"]} == {" six"}
    kept = beams(prompt=COUNT, stop=[" six"], max_tokens=32, include_stop_str_in_output=True)
    assert texts(kept) == [f"{text} six" for text in texts(body)]


def test_a_stop_text_that_begins_and_ends_within_tokens_is_found(beams):
    body = beams(prompt="The capital of France is", stop=["ris. T"], max_tokens=8, n=2)
    stopped = [choice for choice in body["choices"] if choice["finish_reason"] == "stop" and choice["stop_reason"]]
    assert stopped and all(choice["text"].endswith(" Pa") for choice in stopped)


def test_a_stop_text_is_that_of_the_last_token_and_no_older_one():
    words = ["a.", "b", "c.", "..", "d.e", "\ufffd", "é"]

    def decode(tokens):
        return "".join(words[token] for token in tokens).replace("\ufffdé", "é")

    finder = beam_rows.StopFinder([".", "c.", ".e", "é"], decode)
    assert finder([0, 1]) is None
    assert finder.locate([0]) == (1, ".")
    # Two end there; as in vLLM it is the one that the request names first.
    assert finder.locate([0, 1, 2]) == (4, ".")
    assert finder.locate([1, 3]) == (1, ".")
    assert finder.locate([1, 4]) == (2, ".")
    assert finder.locate([1, 5]) is None
    assert finder.locate([1, 5, 6]) == (1, "é")


def test_a_stop_token_ends_a_beam(beams):
    body = beams(prompt="The capital of France is", stop_token_ids=[30], n=1, return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["text"] == " Paris" and choice["stop_reason"] == 30 and choice["token_ids"][-1] == 30


def test_lengths_are_kept_to(beams):
    none = beams(prompt="The capital of France is")
    assert none["choices"][0]["text"] == " Paris." and none["choices"][0]["stop_reason"] is None
    longer = beams(prompt="The capital of France is", min_tokens=5, return_token_ids=True)
    assert all(len(choice["token_ids"]) > 5 for choice in longer["choices"])
    on = beams(prompt="The capital of France is", ignore_eos=True, return_token_ids=True)
    assert all(len(choice["token_ids"]) == 12 for choice in on["choices"])
    assert all(choice["finish_reason"] == "length" for choice in on["choices"])


def test_the_length_penalty_orders_the_same_beams(beams):
    short = beams(prompt="The capital of France is", length_penalty=-2.0)
    long = beams(prompt="The capital of France is", length_penalty=8.0)
    assert texts(short)[0] == " Paris." and len(texts(long)[0]) > len(" Paris.")


def test_tokens_are_allowed_forbidden_biased_and_penalised(beams):
    assert set("".join(texts(beams(prompt="The capital of France is", allowed_token_ids=[7042, 30])))) <= set(" Paris.")
    assert not any("Paris" in text for text in texts(beams(prompt="The capital of France is", bad_words=["Paris"])))
    assert not any("." in text for text in texts(beams(prompt="The capital of France is", logit_bias={"30": -100})))
    once = beams(
        prompt="Again and again and again and again", presence_penalty=2, frequency_penalty=2, return_token_ids=True
    )
    assert all(len(set(choice["token_ids"])) == len(choice["token_ids"]) for choice in once["choices"])


def test_log_probabilities_are_those_of_the_choices_and_of_the_prompt(beams):
    body = beams(prompt="The capital of France is", n=2, logprobs=3, prompt_logprobs=1)
    for choice in body["choices"]:
        told = choice["logprobs"]
        assert math.fsum(told["token_logprobs"]) == pytest.approx(choice["cumulative_logprob"])
        assert all(len(top) in {3, 4} for top in told["top_logprobs"])
        assert len(choice["prompt_logprobs"]) == 5
    echoed = beams(prompt="The capital of France is", n=2, logprobs=3, echo=True)
    for choice, plain in zip(echoed["choices"], body["choices"], strict=True):
        told = choice["logprobs"]
        assert choice["text"] == "The capital of France is" + plain["text"]
        assert told["token_logprobs"][0] is None and len(told["token_logprobs"]) == 5 + len(
            plain["logprobs"]["token_logprobs"]
        )
        assert told["token_logprobs"][5:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    assert json.loads(json.dumps(echoed, allow_nan=False)) == echoed


def test_thirty_two_beams_are_not_too_many(beams):
    body = beams(prompt="The capital of France is", n=32, max_tokens=5)
    assert len(set(texts(body))) == 32


def test_each_prompt_of_a_list_has_a_search(beams):
    body = beams(prompt=["The capital of France is", "The capital of Italy is"], n=2, max_tokens=6)
    assert [text.split(".")[0] for text in texts(body)][::2] == [" Paris", " Rome"]
    assert texts(body)[:2] == texts(beams(prompt="The capital of France is", n=2, max_tokens=6))


def test_a_chat_has_beams(engine):
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 30}
    body |= {"use_beam_search": True, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["!"]}
    event = engine.submit(Request("c", "/v1/chat/completions", json.dumps(body)), lane="batch").result(120)
    best = event.body["choices"][0]
    assert "Paris" in best["message"]["content"] and best["finish_reason"] == "stop"
    assert math.fsum(one["logprob"] for one in best["logprobs"]["content"]) == pytest.approx(best["cumulative_logprob"])


def test_searches_beside_one_another_find_what_each_finds_alone(engine):
    bodies = [
        {"prompt": f"The capital of {land} is", "use_beam_search": True, "n": 3, "max_tokens": 8}
        for land in ("France", "Italy", "Spain", "Japan", "Egypt", "Peru")
    ]

    def found(event):
        return [choice["text"] for choice in event.body["choices"]]

    def send(body):
        return engine.submit(Request("b", "/v1/completions", json.dumps(body)), lane="batch")

    alone = [found(send(body).result(120)) for body in bodies]
    together = [found(future.result(120)) for future in [send(body) for body in bodies]]
    assert together == alone


def test_a_search_whose_caller_goes_away_leaves_the_engine_free(engine):
    body = {"prompt": "Once upon a time", "use_beam_search": True, "n": 8, "max_tokens": 2_000, "ignore_eos": True}
    future = engine.submit(Request("gone", "/v1/completions", json.dumps(body)), lane="batch")
    time.sleep(1)
    assert engine._llm.admission.num_running == 8
    assert future.cancel()
    wait_until_idle(engine, 2.0)
    assert engine._llm.admission.num_running == 0


def test_a_search_past_its_deadline_leaves_the_engine_free(engine):
    body = {"prompt": "Once upon a time", "use_beam_search": True, "n": 8, "max_tokens": 2_000, "ignore_eos": True}

    async def events():
        request = Request("late", "/v1/completions", json.dumps(body))
        return [event async for event in engine.generate(request, lane="batch", deadline=time.time() + 1)]

    (event,) = on_loop(engine, events())
    assert isinstance(event, Failed) and event.failure.reason == "deadline_exceeded"
    wait_until_idle(engine, 2.0)


@pytest.fixture(scope="module")
def transformers_beams():
    """Transformers' beam search over the same weights, in float32: (token ids, score) by choice, best first."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(None).path, dtype=torch.float32)

    def find(tokens, width, max_tokens, **options):
        told = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        answers = told.sequences[:, len(tokens) :].tolist()
        return list(zip(answers, told.sequences_scores.tolist(), strict=True))

    return find


PROMPTS = [FRANCE, [504, 3575, 282, 4649], [6403, 3712, 253, 655], [1780, 28, 827, 28, 1379, 28]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("width", [2, 5])
def test_beams_that_do_not_end_are_those_of_transformers(beams, transformers_beams, prompt, width):
    options = {"prompt": prompt, "n": width, "max_tokens": 10, "length_penalty": 0.0}
    ours = beams(**options, ignore_eos=True, return_token_ids=True)
    theirs = transformers_beams(prompt, width, 10, length_penalty=0.0, eos_token_id=-1)
    assert [choice["token_ids"] for choice in ours["choices"]] == [tokens for tokens, _ in theirs]
    assert [choice["score"] for choice in ours["choices"]] == pytest.approx([score for _, score in theirs], abs=1e-3)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_best_of_beams_that_end_is_at_least_as_good_as_that_of_transformers(beams, transformers_beams, prompt):
    """Transformers lets a beam end only among the best `n` continuations of a step; here it ends whatever its rank."""
    ours = beams(prompt=prompt, n=4, max_tokens=16, length_penalty=0.0, return_token_ids=True)
    theirs = transformers_beams(prompt, 4, 16, length_penalty=0.0, early_stopping="never", eos_token_id=2)
    assert ours["choices"][0]["score"] >= theirs[0][1] - 1e-3
    found = {tuple(choice["token_ids"]): choice["score"] for choice in ours["choices"]}
    for tokens, score in theirs:
        # What they find and we don't has to be worse than our last.
        answer = tuple(tokens[: tokens.index(2) + 1] if 2 in tokens else tokens)
        assert found.get(answer, score) == pytest.approx(score, abs=1e-3)
        assert answer in found or score <= min(found.values()) + 1e-3


def test_the_early_end_finds_what_the_full_search_finds(engine, beams, monkeypatch):
    options = {"prompt": "Q: What is the capital of France?\nA:", "max_tokens": 24, "stop": ["\n"]}
    early = beams(**options)
    make_rules = beam_rows.make_rules
    monkeypatch.setattr(beam_rows, "make_rules", lambda task: replace(make_rules(task), stop_early=False))
    full = beams(**options)
    assert texts(early) == texts(full)
    assert early["usage"]["search_tokens"] < full["usage"]["search_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_hundreds_of_long_beam_rows_leave_room_for_greedy_ones(engine):
    long = " ".join(f"line {number}: the quick brown fox" for number in range(60))
    beams = [
        {"prompt": f"{number} {long}", "use_beam_search": True, "n": 8, "max_tokens": 6, "ignore_eos": True}
        for number in range(200)
    ]
    greedy = [{"prompt": f"{number}, ", "max_tokens": 6, "temperature": 0} for number in range(10)]
    done = []

    async def answer(body, lane):
        request = Request("r", "/v1/completions", json.dumps(body))
        events = [event async for event in engine.generate(request, lane=lane)]
        done.append((body, events[-1]))

    async def mixed():
        searching = [asyncio.create_task(answer(body, "batch")) for body in beams]
        await asyncio.sleep(0.5)
        await asyncio.gather(*(answer(body, "online") for body in greedy))
        num_searched = sum("use_beam_search" in body for body, _ in done)
        peak = engine._llm.admission.num_running
        await asyncio.gather(*searching)
        return num_searched, peak

    num_searched, peak = on_loop(engine, mixed(), 1_500)
    assert all(isinstance(event, Answered) for _, event in done) and len(done) == 210
    # The greedy ones didn't wait for the beams before them, and no more rows ran than there were places (and a few).
    assert num_searched < 20 and peak <= 64 + 64 // 16
