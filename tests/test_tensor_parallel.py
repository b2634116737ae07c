"""One engine on several groups of cores (tensor parallel) answers as one on a single group does."""

import json

import pytest

from pipelines import machine
from pipelines.model import resolve
from pipelines.vllm_engine import VllmEngine
from schemas.requests import Answered, Request
from schemas.settings import EngineSettings
from tests.models import write_llama

PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3,", "A long one: " + "word " * 100]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(machine.count_cores() < 2, reason="two groups of cores need two cores")
def test_two_ranks_answer_token_for_token_as_one(tmp_path, own_core_claims):
    model = resolve(str(write_llama(tmp_path / "random-llama")))
    answers = [greedy_tokens(model, tensor_parallel_size=ranks) for ranks in (1, 2)]
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == len(PROMPTS), "the answers say something of their prompts"


def greedy_tokens(model, **settings):
    given = EngineSettings(dtype="float32", cores=2, kv_cache_gib=0.25, max_num_seqs=16, **settings)
    engine = VllmEngine.start(model, (), given)
    try:
        body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        sent = [
            engine.submit(Request("r", "/v1/completions", json.dumps({"prompt": prompt, **body})), lane="batch")
            for prompt in PROMPTS
        ]
        events = [future.result(timeout=120) for future in sent]
    finally:
        engine.close()
    assert all(isinstance(event, Answered) for event in events), events
    return [event.body["choices"][0]["token_ids"] for event in events]
