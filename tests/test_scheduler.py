"""vLLM's scheduler as an endpoint has it: the real one, and steps that nothing computes. Their time is a formula's."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pipelines import scheduler as paced
from pipelines.model import resolve
from pipelines.pacing import Targets

BLOCK, SLOTS, STEP_TOKENS = 32, 64, 1024


@pytest.fixture(scope="module")
def configuration():
    """A step is to take 100 ms at most beside people, and as long alone as half of their first token's time."""
    targets = Targets(first_token_s=0.4, inter_token_s=0.1)
    arguments = EngineArgs(
        model=resolve(None).path,
        scheduling_policy="priority",
        max_num_seqs=SLOTS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=512,
        enable_prefix_caching=False,
        block_size=BLOCK,
        **paced.to_arguments(targets),
    )
    configuration = arguments.create_engine_config()
    configuration.cache_config.num_gpu_blocks = 1000
    return configuration


class Engine:
    """A step takes 10 ms, and 1 ms for each token."""

    def __init__(self, configuration, monkeypatch):
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(paced, "time", clock)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        make = configuration.scheduler_config.get_scheduler_cls()
        self.scheduler = make(
            vllm_config=configuration,
            kv_cache_config=KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(configuration),
            block_size=BLOCK,
            log_stats=True,
        )
        self.numbers = itertools.count()
        self.came, self.first, self.steps = {}, {}, []

    def send(self, lane, num_prompt=20, num_tokens=40, priority=0):
        name = f"{lane} {next(self.numbers)}"
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
        rank = paced.rank(lane, priority)
        self.scheduler.add_request(
            Request(name, [1] * num_prompt, sampling, None, arrival_time=self.now, priority=rank)
        )
        self.came[name] = self.now
        return name

    def step(self):
        """Tokens that each has in the next step."""
        output = self.scheduler.schedule()
        tokens = dict(output.num_scheduled_tokens)
        seconds = 0.01 + 0.001 * sum(tokens.values())
        self.now += seconds
        done = {name for name in tokens if not self.scheduler.requests[name].is_prefill_chunk}
        sampled = [[7] if name in done else [] for name in tokens]
        places = {name: place for place, name in enumerate(tokens)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(list(tokens), places, sampled))
        for name in done:
            self.first.setdefault(name, self.now - self.came[name])
        self.steps.append(seconds)
        return tokens

    def run(self, num_steps, batch=0):
        """`batch`: rows that are in it at each time."""
        for _ in range(num_steps):
            while sum(name.startswith("batch") for name in self.scheduler.requests) < batch:
                self.send("batch")
            self.step()


@pytest.fixture
def engine(configuration, monkeypatch):
    return Engine(configuration, monkeypatch)


def test_a_person_s_first_token_comes_in_time_though_the_engine_is_full_of_rows(engine):
    engine.run(60, batch=48)
    for _ in range(20):
        person = engine.send("online", num_prompt=40, num_tokens=4)
        engine.run(9, batch=48)
        assert engine.first[person] <= 0.2
    assert max(engine.steps[60:]) <= 0.2


def test_while_somebody_reads_along_steps_are_as_short_as_was_said(engine):
    engine.run(60, batch=48)
    engine.send("online", num_tokens=400)
    engine.run(20, batch=48)
    engine.steps.clear()
    for _ in range(15):
        engine.send("online", num_prompt=30, num_tokens=2)
        engine.run(10, batch=48)
    assert max(engine.steps) <= 0.1
    # What was there is made use of.
    assert sum(engine.steps) / len(engine.steps) > 0.07


def test_alone_a_batch_has_steps_as_long_as_somebody_who_comes_may_wait(engine):
    engine.run(60, batch=64)
    assert 0.09 < max(engine.steps[30:]) <= 0.2
    assert engine.scheduler._num_left_out == 0


def test_rows_that_a_step_leaves_out_go_on_later_and_lose_nothing(engine):
    engine.run(60, batch=60)
    rows = {name for name in engine.scheduler.requests if name.startswith("batch")}
    person = engine.send("online", num_prompt=60, num_tokens=60)
    engine.step()
    assert engine.scheduler._num_left_out > 20
    stats = engine.scheduler.make_stats()
    assert stats.num_running_reqs + stats.num_skipped_waiting_reqs == len(engine.scheduler.running)
    while any(name in engine.scheduler.requests for name in (*rows, person)):
        tokens = engine.step()
        # Nobody is thrown out or begun anew.
        assert all(num_tokens == 1 for name, num_tokens in tokens.items() if engine.first.get(name, 0) and name in rows)


def test_what_is_urgent_goes_on_and_what_is_not_is_left_out(engine):
    engine.run(60, batch=40)
    for name in list(engine.scheduler.requests):
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    rows = [engine.send("batch", priority=number % 2, num_tokens=200) for number in range(60)]
    while len(engine.scheduler.running) < 60 or any(request.is_prefill_chunk for request in engine.scheduler.running):
        engine.step()
    engine.send("online", num_prompt=60)
    tokens = engine.step()
    urgent, other = rows[::2], rows[1::2]
    assert sum(name in tokens for name in urgent) > 10 and not any(name in tokens for name in other)


def test_a_row_goes_on_though_people_fill_the_steps(engine):
    row = engine.send("batch", num_tokens=30)
    engine.step()
    for _ in range(40):
        engine.send("online", num_prompt=100, num_tokens=30)
    steps = [engine.step() for _ in range(20)]
    assert all(row in tokens for tokens in steps)


def test_a_long_prompt_of_a_row_is_computed_in_what_is_left(engine):
    engine.run(60, batch=8)
    engine.send("online", num_tokens=400)
    engine.run(3, batch=8)
    row = engine.send("batch", num_prompt=400, num_tokens=1)
    engine.steps.clear()
    tokens = []
    while row in engine.scheduler.requests:
        tokens.append(engine.step().get(row, 0))
    assert sum(tokens) == 400 and 5 <= len(tokens) <= 12
    assert max(engine.steps) <= 0.1


def test_people_alone_have_the_whole_step(engine):
    person = engine.send("online", num_prompt=500)
    assert engine.step() == {person: 500}
    assert engine.scheduler.max_num_scheduled_tokens == STEP_TOKENS


def test_priorities_of_requests_never_leave_their_lane():
    assert paced.rank("online", 2**63 - 1) < paced.BATCH_RANK <= paced.rank("batch", -(2**63))
    assert paced.rank("batch", -3) < paced.rank("batch", 4)
