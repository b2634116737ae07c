"""vLLM's scheduler, with steps that people and batch requests share so that people have their tokens in time.

Batch requests are those of ranks from `BATCH_RANK` on (`rank`): vLLM takes all others first. What there is of a step
for batch requests says `pipelines/pacing.py`. Those for which there is none stay in the engine and keep what is
computed of them; the step leaves them out. Runs in the engine's process.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from pipelines.pacing import Load, Pacer, Targets
from schemas.requests import Lane

# Under this name vLLM's configuration carries the targets from one process to the other.
TARGETS = "overnight_targets"
_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
# Ranks of batch requests begin here; priorities are held to what lies between.
BATCH_RANK = 2**42
_MOST_PRIORITY = 2**40


def rank(lane: Lane, priority: int) -> int:
    """What vLLM is to take for a request's priority: lower is earlier."""
    held = min(max(priority, -_MOST_PRIORITY), _MOST_PRIORITY)
    return held + (2 * BATCH_RANK if lane == "batch" else 0)


def to_arguments(targets: Targets) -> dict[str, Any]:
    """Arguments of a vLLM engine whose steps are held to targets."""
    seconds = [None if math.isinf(s) else s for s in (targets.first_token_s, targets.inter_token_s)]
    return {"scheduler_cls": f"{__name__}.{make_scheduler.__name__}", "additional_config": {TARGETS: seconds}}


def make_scheduler(vllm_config: Any, **others: Any) -> "PacedScheduler | PacedAsyncScheduler":
    """What vLLM calls for its scheduler."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (PacedAsyncScheduler if is_async else PacedScheduler)(vllm_config, **others)


@dataclass(slots=True)
class _Step:
    """A step that is under way."""

    output: Any
    began: float
    load: Load
    of_batch: Load
    has_people: bool
    # When those people came who have their first tokens of it, by `time.time()`.
    arrivals: list[float]


class _Paced:
    """Goes before a scheduler of vLLM's."""

    # Of that.
    running: list[Request]
    waiting: Any
    deferred_waiting: set[Request]
    requests: dict[str, Request]
    scheduler_config: Any
    current_step: int
    max_num_scheduled_tokens: int

    def __init__(self, vllm_config: Any, *others: Any, **more: Any) -> None:
        super().__init__(vllm_config, *others, **more)  # type: ignore[call-arg]  # vLLM's class comes after this one
        first, between = vllm_config.additional_config[TARGETS]
        self._pacer = Pacer(Targets(first or math.inf, between or math.inf))
        self._whole_step = self.max_num_scheduled_tokens
        self._under_way: deque[_Step] = deque()
        self._ended: float | None = None
        self._num_left_out = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        began = time.monotonic()
        running = self.running
        # vLLM computes those first that stand first.
        running.sort(key=_is_batch)
        people = [request for request in running if not _is_batch(request)]
        rows = running[len(people) :]
        coming = [request for request in self.waiting if not _is_batch(request) and self._may_come(request)]
        has_people = bool(people or coming)
        self.max_num_scheduled_tokens, self._num_left_out = self._whole_step, 0
        if rows or any(_is_batch(request) for request in self.waiting):
            self._share(people + coming, rows, bool(coming), has_people)
        output = super().schedule(throttle_prefills)  # type: ignore[misc]  # vLLM's class comes after this one
        self._under_way.append(self._step(output, began, has_people))
        return output

    def _share(self, people: list[Request], rows: list[Request], is_coming: bool, has_people: bool) -> None:
        """Leave batch requests out of the next step, and tokens of their prompts, for which it has no room."""
        theirs = _sum(self._needed(request) for request in people)
        answering = [request for request in rows if self._needed(request).num_answer]
        room = self._pacer.room(theirs, len(answering), has_people)
        left_out = sorted(answering, key=_urgency)[room.num_answer :]
        if is_coming or not room.num_prompt:
            # A prompt that is under way would take what is meant for that of the person who comes: vLLM turns to those
            # who wait last.
            left_out += [request for request in rows if self._needed(request).num_prompt]
        for request in left_out:
            request.next_decode_eligible_step = self.current_step + 2
        self._num_left_out = len(left_out)
        whole = theirs.num_tokens + room.num_tokens
        self.max_num_scheduled_tokens = max(1, min(self._whole_step, whole))

    def _may_come(self, request: Request) -> bool:
        """Whether it waits for nothing but its turn: a grammar isn't compiled yet, an adapter has no room."""
        return request.status in _READY and request not in self.deferred_waiting

    def _needed(self, request: Request) -> Load:
        """What a request has to have computed in the next step. Of a prompt that waits, as if nothing were cached."""
        num_left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        if request.num_computed_tokens >= request.num_prompt_tokens:
            return Load(num_answer=max(0, num_left))
        return Load(num_prompt=min(num_left, self.scheduler_config.long_prefill_token_threshold or num_left))

    def _step(self, output: Any, began: float, has_people: bool) -> _Step:
        loads, arrivals = {False: Load(), True: Load()}, []
        new = {told.req_id for told in output.scheduled_new_reqs}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            is_batch, was_computed = _is_batch(request), request.num_computed_tokens - num_tokens
            is_prompt = was_computed < request.num_prompt_tokens
            load = Load(num_prompt=num_tokens) if is_prompt else Load(num_answer=num_tokens)
            loads[is_batch] = _sum((loads[is_batch], load))
            # A prompt that takes several steps says little about what else is in them.
            is_whole = request_id in new and request.num_computed_tokens >= request.num_prompt_tokens
            if is_whole and not is_batch:
                arrivals.append(request.arrival_time)
        return _Step(output, began, _sum(loads.values()), loads[True], has_people, arrivals)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = time.monotonic()
        # Steps end in the order in which they began.
        while self._under_way:
            if (step := self._under_way.popleft()).output is scheduler_output:
                self._measure(step, now)
                break
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]  # of vLLM's class
        # The next step begins as this one ends, where there is one to be.
        self._ended = now if self.running or self.waiting else None
        return outputs

    def _measure(self, step: _Step, now: float) -> None:
        if not step.load.num_tokens:
            return
        began = step.began if self._ended is None else self._ended
        self._pacer.stepped(step.load, step.of_batch, step.has_people, now - began)
        if step.of_batch.num_tokens:
            for arrived in step.arrivals:
                self._pacer.first_token(time.time() - arrived)

    def make_stats(self, *others: Any, **more: Any) -> SchedulerStats | None:
        """vLLM's, that count those left out with those which a passing reason holds back."""
        stats: SchedulerStats | None = super().make_stats(*others, **more)  # type: ignore[misc]  # of vLLM's class
        if stats is not None:
            stats.num_running_reqs -= self._num_left_out
            stats.num_skipped_waiting_reqs += self._num_left_out
        return stats


class PacedScheduler(_Paced, Scheduler):  # type: ignore[misc]  # vLLM's classes have no types here
    """For engines that make one step after the other."""


class PacedAsyncScheduler(_Paced, AsyncScheduler):  # type: ignore[misc]  # vLLM's classes have no types here
    """For engines that plan a step while the one before is computed."""


def _is_batch(request: Request) -> bool:
    return bool(request.priority >= BATCH_RANK)


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_time


def _sum(loads: Any) -> Load:
    num_answer = num_prompt = 0
    for load in loads:
        num_answer, num_prompt = num_answer + load.num_answer, num_prompt + load.num_prompt
    return Load(num_answer, num_prompt)
