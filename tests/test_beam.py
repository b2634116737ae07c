"""Beam search on toy models: against every answer that there is, and the early end against the full search."""

import asyncio
import itertools
import math
import random
from dataclasses import replace

import pytest

from pipelines.beam import BeamRules, BeamSearch, search

END = 0


class Toy:
    """A model of few tokens; each beginning has log-probabilities of its own, drawn by a seed."""

    def __init__(self, seed, num_tokens=4, *, sharpness=2.0):
        self.seed, self.num_tokens, self.sharpness = seed, num_tokens, sharpness
        self.num_asked = 0

    def logprobs(self, tokens):
        draw = random.Random(hash((self.seed, *tokens)))  # noqa: S311
        logits = [draw.gauss(0, self.sharpness) for _ in range(self.num_tokens)]
        total = math.log(math.fsum(map(math.exp, logits)))
        ranked = sorted(enumerate(logits), key=lambda pair: -pair[1])
        return {token: logit - total for token, logit in ranked}

    async def next_tokens(self, beams):
        self.num_asked += len(beams)
        return [self.logprobs(beam.tokens) for beam in beams]


def run(rules, model):
    return asyncio.run(search(rules, model))


def told(found):
    return [(one.beam.tokens, round(one.score, 9), one.finish_reason, one.stop_reason) for one in found]


def every_answer(rules, model):
    """Every answer that a model can give, by the plainest of means: (score, tokens), best first."""
    answers = []

    def walk(tokens, total):
        if len(tokens) == rules.max_tokens:
            answers.append((total / (rules.prompt_length + len(tokens)) ** rules.length_penalty, tokens))
            return
        for token, logprob in model.logprobs(tokens).items():
            if token in rules.end_token_ids:
                if len(tokens) >= rules.min_tokens:
                    length = max(1, rules.prompt_length + len(tokens))
                    answers.append(((total + logprob) / length**rules.length_penalty, (*tokens, token)))
            else:
                walk((*tokens, token), total + logprob)

    walk((), 0.0)
    return sorted(answers, reverse=True)


def rules(**fields):
    return BeamRules(**{"width": 3, "max_tokens": 5, "prompt_length": 4, "end_token_ids": frozenset({END}), **fields})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_a_search_wide_enough_finds_the_best_of_all_answers(seed, length_penalty, min_tokens):
    wide = rules(width=300, max_tokens=5, length_penalty=length_penalty, min_tokens=min_tokens)
    best = every_answer(wide, Toy(seed))
    found = run(wide, Toy(seed))
    assert [one.beam.tokens for one in found] == [tokens for _, tokens in best[: len(found)]]
    assert len(found) == min(300, len(best))
    assert [one.score for one in found] == pytest.approx([score for score, _ in best[: len(found)]])


@pytest.mark.parametrize("seed", range(60))
def test_the_early_end_changes_nothing_but_the_cost(seed):
    draw = random.Random(seed)  # noqa: S311
    wanted = rules(
        width=draw.randint(1, 5),
        max_tokens=draw.choice([1, 2, 7, 12]),
        prompt_length=draw.choice([0, 1, 30]),
        length_penalty=draw.choice([1.0, 0.0, 0.5, 2.0, -1.0]),
        min_tokens=draw.choice([0, 0, 1]),
        end_token_ids=frozenset(draw.sample(range(6), draw.choice([0, 1, 2]))),
        logit_bias=draw.choice([{}, {1: -2.0, 3: -100.0}]),
        presence_penalty=draw.choice([0.0, 0.0, 0.7]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.3]),
        bad_words=draw.choice([(), ((2,),), ((1, 2), (3, 3, 1))]),
        find_stop=draw.choice([None, lambda tokens: "stop" if tokens[-2:] == (2, 3) else None]),
    )
    early, full = Toy(seed, 6), Toy(seed, 6)
    assert told(run(wanted, early)) == told(run(replace(wanted, stop_early=False), full))
    assert early.num_asked <= full.num_asked


def test_the_early_end_saves_most_of_a_search_whose_answers_end():
    class Ending(Toy):
        def logprobs(self, tokens):
            likely = {END: -0.05, 1: -4.0, 2: -5.0} if len(tokens) > 2 else {1: -0.1, 2: -3.0, END: -9.0}
            return likely

    wanted = rules(width=2, max_tokens=64, prompt_length=20)
    early, full = Ending(0), Ending(0)
    assert told(run(wanted, early)) == told(run(replace(wanted, stop_early=False), full))
    assert early.num_asked * 4 < full.num_asked


def test_choices_are_as_many_as_the_width_and_the_best_comes_first():
    found = run(rules(width=4, max_tokens=6), Toy(7))
    assert len({one.beam.tokens for one in found}) == 4
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        steps = one.beam.steps()
        total = math.fsum(step[token] for step, token in zip(steps, one.beam.tokens, strict=True))
        assert one.beam.cumulative == pytest.approx(total)


def test_an_answer_of_nothing_but_its_end_has_a_score():
    found = run(rules(width=1, prompt_length=0, length_penalty=1.0, max_tokens=3), Always({END: -0.1, 1: -3.0}))
    assert told(found) == [((END,), -0.1, "stop", END)]


class Always(Toy):
    """Says the same at every place."""

    def __init__(self, step):
        super().__init__(0)
        self.step = step

    def logprobs(self, tokens):
        return self.step


def test_reasons_tell_how_an_answer_ended():
    step = {1: -0.5, 2: -1.0, END: -3.0}
    ended = run(rules(width=2, max_tokens=2, find_stop=lambda tokens: "two" if tokens[-1] == 2 else None), Always(step))
    assert told(ended)[0] == ((1, 1), round(-1.0 / 6, 9), "length", None)
    assert told(ended)[1] == ((2,), round(-1.0 / 5, 9), "stop", "two")


def test_nothing_ends_before_its_least_length_by_token_or_by_text():
    step = {END: -0.01, 2: -0.02, 1: -6.0}
    wanted = rules(width=3, max_tokens=4, min_tokens=3, find_stop=lambda tokens: "two" if tokens[-1] == 2 else None)
    found = run(wanted, Always(step))
    assert all(len(one.beam.tokens) == 4 for one in found) and found[0].stop_reason in {END, "two"}


def test_words_that_are_bad_and_tokens_that_are_not_allowed_never_come():
    step = {1: -0.1, 2: -0.2, 3: -0.3, 4: -0.4}
    wanted = rules(width=8, max_tokens=4, bad_words=((1, 2), (4,)), allowed_token_ids=frozenset({1, 2, 4}))
    answers = [one.beam.tokens for one in run(wanted, Always(step))]
    assert answers and all((1, 2) not in itertools.pairwise(tokens) for tokens in answers)
    assert {token for tokens in answers for token in tokens} == {1, 2}


def test_biases_and_penalties_shift_what_is_chosen():
    step = {1: -0.1, 2: -0.2, 3: -3.0}
    assert run(rules(width=1, logit_bias={1: -5.0}), Always(step))[0].beam.tokens == (2,) * 5
    once = run(rules(width=1, max_tokens=3, presence_penalty=1.0), Always(step))[0]
    assert once.beam.tokens == (1, 2, 1) and once.beam.cumulative == pytest.approx(-0.1 - 0.2 - 1.1)
    often = run(rules(width=1, max_tokens=4, frequency_penalty=1.0), Always(step))[0]
    assert often.beam.tokens == (1, 2, 1, 2) and often.beam.cumulative == pytest.approx(-0.1 - 0.2 - 1.1 - 1.2)
    assert rules(frequency_penalty=1.0).num_logprobs(5) == 2 * 3 + 5


@pytest.mark.parametrize("lift", [{"logit_bias": {1: 0.5}}, {"presence_penalty": -0.5}, {"frequency_penalty": -1.0}])
def test_what_lifts_a_token_is_refused(lift):
    with pytest.raises(ValueError, match="lifts a token"):
        rules(**lift)


def test_a_search_with_nowhere_to_go_ends_with_what_it_has():
    assert run(rules(allowed_token_ids=frozenset({9})), Toy(1)) == []
    assert run(rules(max_tokens=0), Toy(1)) == []
    dead_end = run(rules(width=2, max_tokens=3, allowed_token_ids=frozenset({1, END})), Always({1: -1.0, END: -2.0}))
    assert [one.beam.tokens for one in dead_end] == [(1, 1, 1), (END,)]


def test_beams_advance_one_token_at_a_time():
    under_way = BeamSearch(rules(width=2))
    under_way.advance([{1: -0.5, 2: -1.0, 3: -2.0, END: -9.0}])
    assert [beam.tokens for beam in under_way.live] == [(1,), (2,)]
    with pytest.raises(ValueError, match="shorter"):
        under_way.advance([{1: -0.5}])
