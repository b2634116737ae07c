"""How much batch requests may have of an engine's steps: the rule alone, against an engine that is a formula."""

import pytest

from pipelines.pacing import Pacer, Targets


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """An engine whose steps take 20 ms and 1 ms for each token, of a batch that always has more to do."""

    def __init__(self, targets, most=4096):
        self.clock = Clock()
        self.pacer = Pacer(targets, most, self.clock)
        self.longest = 0.0

    def run(self, seconds, others=0, used=None):
        """`others`: tokens of people in each step; `used`: of batch requests, all of the budget by default."""
        until, self.longest = self.clock.now + seconds, 0.0
        while self.clock.now < until:
            tokens = self.pacer.budget if used is None else used
            if used is None:
                self.pacer.short()
            step = 0.02 + 0.001 * (tokens + others)
            self.clock.now += step
            self.longest = max(self.longest, step)
            self.pacer.step(step, tokens, others > 0)


TARGETS = Targets(first_token_s=1.0, inter_token_s=0.2)


@pytest.mark.parametrize(
    ("targets", "step_s"),
    [(TARGETS, 0.2), (Targets(0.3, 0.2), 0.15), (Targets(float("inf"), 0.2), 0.2), (Targets(1, float("inf")), 0.5)],
)
def test_steps_come_as_near_to_the_target_as_they_may(targets, step_s):
    steps = Steps(targets)
    steps.run(20)
    steps.run(10)
    assert 0.7 * step_s < steps.longest <= step_s


def test_it_makes_room_for_people_and_takes_it_again():
    steps = Steps(TARGETS)
    steps.run(20)
    alone = steps.pacer.budget
    steps.run(5, others=80)
    steps.run(5, others=80)
    beside = steps.pacer.budget
    assert beside < alone - 60 and steps.longest <= 0.2
    steps.run(5)
    assert steps.pacer.budget == pytest.approx(alone, rel=0.05)


def test_those_that_are_in_already_count_once():
    """The batch that is in an engine stays in it for a while when the budget shrinks: that is no reason to go on."""
    steps = Steps(TARGETS)
    steps.run(5, used=400)
    assert steps.pacer.budget == 400 / 2


def test_a_budget_that_isnt_used_doesnt_grow():
    steps = Steps(TARGETS)
    before = steps.pacer.budget
    steps.run(10, used=3)
    assert steps.pacer.budget == before


def test_late_first_tokens_shrink_it_though_steps_are_short():
    steps = Steps(TARGETS)
    steps.run(20)
    before = steps.pacer.budget
    steps.pacer.first_token(1.8, before)
    steps.run(0.6)
    assert steps.pacer.budget == pytest.approx(before / 2, rel=0.05)


def test_where_people_alone_take_longer_one_is_let_in_still():
    steps = Steps(TARGETS)
    steps.run(30, others=500)
    assert steps.pacer.budget == 1
    steps.run(20)
    assert steps.pacer.budget > 100


def test_it_never_goes_beyond_what_a_step_computes():
    steps = Steps(Targets(100, 100), most=256)
    steps.run(60)
    assert steps.pacer.budget == 256
