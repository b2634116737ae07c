"""How much batch requests may have of an engine's steps: the rule alone, against an engine that is a formula."""

import random

import pytest

from pipelines.pacing import Load, Pacer, StepTimes, Targets

TARGETS = Targets(first_token_s=1.0, inter_token_s=0.2)


def _seconds(load: Load) -> float:
    return 0.02 + 0.0015 * load.num_answer + 0.001 * load.num_prompt


class Engine:
    """An engine whose steps take a formula's time, and a batch that always has more to do."""

    def __init__(self, targets, slots=4096, noise=0.0):
        self.pacer = Pacer(targets)
        self.slots, self.noise = slots, noise
        self.draw = random.Random(3)  # noqa: S311
        self.taken, self.rows = [], []

    def run(self, num_steps, people=None, has_people=None):
        """`people`: what they have in each step, by its number."""
        self.taken, self.rows = [], []
        for number in range(num_steps):
            theirs = people(number) if people else Load()
            has = bool(theirs.num_tokens) if has_people is None else has_people
            rows = self.pacer.room(theirs, self.slots, has)
            load = Load(theirs.num_answer + rows.num_answer, theirs.num_prompt + rows.num_prompt)
            seconds = _seconds(load) * (1 + self.noise * self.draw.random() ** 4)
            self.pacer.stepped(load, rows, has, seconds)
            self.taken.append(seconds)
            self.rows.append(rows)


def test_times_are_learnt_from_loads():
    times, draw = StepTimes(), random.Random(1)  # noqa: S311
    for _ in range(200):
        load = Load(draw.randint(1, 60), draw.choice((0, 0, 80)))
        times.learn(load, _seconds(load) * draw.uniform(0.97, 1.03))
    assert times.step_s == pytest.approx(0.02, rel=0.15)
    assert times.answer_s == pytest.approx(0.0015, rel=0.1) and times.prompt_s == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize(
    ("targets", "step_s"),
    [(TARGETS, 0.2), (Targets(0.3, 0.2), 0.15), (Targets(float("inf"), 0.2), 0.2), (Targets(1, float("inf")), 0.5)],
)
def test_steps_beside_people_come_as_near_to_the_target_as_they_may(targets, step_s):
    engine = Engine(targets)
    engine.run(100, lambda _: Load(2))
    engine.run(50, lambda _: Load(2))
    assert 0.85 * step_s < max(engine.taken) <= step_s


def test_alone_they_are_held_to_what_a_person_who_comes_waits():
    engine = Engine(TARGETS)
    engine.run(100)
    assert 0.4 < max(engine.taken) <= 0.5


def test_a_person_s_prompt_makes_room_in_its_own_step():
    engine = Engine(TARGETS)
    engine.run(200, lambda number: Load(10, 80 if number % 3 == 0 else 0))
    engine.run(200, lambda number: Load(10, 80 if number % 3 == 0 else 0))
    assert max(engine.taken) <= 0.2
    with_prompt, without = engine.rows[0], engine.rows[1]
    assert without.num_answer - with_prompt.num_answer == pytest.approx(80 / 1.5, abs=3)


def test_noise_is_learnt_until_as_many_are_in_time_as_are_to_be():
    engine = Engine(TARGETS, noise=0.4)
    engine.run(3000, lambda _: Load(10))
    engine.run(3000, lambda _: Load(10))
    late = sum(seconds > 0.2 for seconds in engine.taken) / 3000
    assert late < 0.008
    # And no more is left unused than that takes.
    assert sum(engine.taken) / 3000 > 0.14


def test_late_first_tokens_shorten_steps_that_are_in_time_themselves():
    engine = Engine(Targets(0.4, 1.0))
    engine.run(100, lambda _: Load(2))
    before = max(engine.taken)
    for _ in range(5):
        engine.pacer.first_token(0.5)
    engine.run(100, lambda _: Load(2))
    assert max(engine.taken) == pytest.approx(before * 0.96**5, rel=0.03)


def test_prompts_have_what_answers_leave_in_pieces_that_are_worth_it():
    engine = Engine(TARGETS, slots=40)
    engine.run(100, lambda _: Load(2))
    assert engine.rows[-1].num_answer == 40 and engine.rows[-1].num_prompt > 80
    engine.slots = 115
    engine.run(100, lambda _: Load(2))
    assert engine.rows[-1].num_prompt == 0


def test_where_people_alone_take_too_long_one_goes_on_still():
    engine = Engine(TARGETS)
    engine.run(60, lambda _: Load(500))
    assert engine.rows[-1] == Load(1, 0)
    # What is late then is nothing that leaving out rows would mend: they have theirs at once when people are gone.
    engine.run(5)
    assert engine.rows[-1].num_answer > 200


def test_prompts_alone_go_on_by_a_piece():
    engine = Engine(TARGETS, slots=0)
    engine.run(60, lambda _: Load(500))
    assert engine.rows[-1] == Load(0, 16)


def test_the_first_steps_are_small_and_grow_by_what_was_measured():
    engine = Engine(TARGETS)
    engine.run(3)
    sizes = [rows.num_tokens for rows in engine.rows]
    assert sizes[:2] == [64, 128] and 200 < sizes[2] <= 256
