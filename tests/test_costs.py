"""Costs: what was computed is paid for, and an estimate goes by what an earlier run of the same model did."""

import pytest

from pipelines.costs import Experience, cost_of, estimate, experience_of
from schemas.failures import UsageError
from schemas.plans import Totals
from schemas.requests import Tally
from schemas.settings import Prices, parse_prices

TOTALS = Totals(
    num_rows=10,
    num_repeated=2,
    prompt_tokens=1_000_000,
    repeated_tokens=200_000,
    shared_tokens=400_000,
    output_tokens=500_000,
    computed_tokens=400_000,
)
PRICES = Prices(prompt=1, cached=0.25, completion=10)


def manifest(**changes):
    computed = {"prompt_tokens": 800, "cached_tokens": 0, "completion_tokens": 200, "work": 400 + 800 / 8}
    return {
        "run_id": "r1",
        "model": {"identities": {"": "m"}},
        "computed": computed,
        "timings_s": {"infer": 10.0},
        "replicas": 2,
    } | changes


def test_a_run_costs_what_was_computed():
    tally = Tally(
        prompt_tokens=1_200_000,
        deduplicated_prompt_tokens=200_000,
        cached_tokens=400_000,
        completion_tokens=500_000,
        deduplicated_tokens=100_000,
    )
    assert cost_of(tally, PRICES, 3.0) == pytest.approx(0.6 * 1 + 0.4 * 0.25 + 0.4 * 10)
    assert cost_of(tally, Prices(replica_hour=2), 3.0) == pytest.approx(6)
    # What is found in the cache costs as much as other tokens, where nobody says.
    assert cost_of(tally, Prices(prompt=1), 0) == pytest.approx(1.0)


def test_an_earlier_run_tells_how_long_answers_are_and_how_fast_they_come():
    told = experience_of(manifest(), {"": "m"})
    # 200 of at most 400 tokens; those and an eighth of 800 prompt tokens, on two replicas for ten seconds.
    assert told == Experience("r1", 0.5, (200 + 800 / 8) / 20)


@pytest.mark.parametrize(
    "other",
    [
        None,
        manifest(model={"identities": {"": "another"}}),
        manifest(timings_s={"infer": 0}),
        manifest(replicas=0),
        {"version": "1", "run_id": "r1"},
        manifest(computed={"completion_tokens": 0}),
    ],
)
def test_other_runs_tell_nothing(other):
    assert experience_of(other, {"": "m"}) is None


def test_an_estimate_without_an_earlier_run_is_a_bound():
    told = estimate(TOTALS, 2, None, PRICES)
    assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == (800_000, 400_000, 400_000)
    assert told.seconds is None and told.cost == pytest.approx(0.4 + 0.4 * 0.25 + 4)
    assert estimate(TOTALS, 2, None, Prices(replica_hour=1)).cost is None
    assert estimate(TOTALS, 2, None, None).cost is None


def test_an_estimate_by_an_earlier_run():
    told = estimate(TOTALS, 2, Experience("r1", 0.5, 100.0), Prices(completion=10, replica_hour=36))
    assert told.completion_tokens == 200_000
    assert told.seconds == pytest.approx((200_000 + 400_000 / 8) / 100 / 2)
    assert told.cost == pytest.approx(2 + 2 * told.seconds / 3600 * 36)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["prompt"], "--price prompt: expected FIELD=VALUE, such as --price completion=0.60"),
        (["tokens=1"], "--price tokens: no such price. There are: prompt, completion, cached, replica_hour"),
        (["prompt=-1"], "--price prompt=-1: input should be greater than or equal to 0"),
    ],
)
def test_prices_that_are_none_are_refused(pairs, words):
    with pytest.raises(UsageError) as refused:
        parse_prices(pairs)
    assert str(refused.value) == words


def test_prices_are_read():
    assert parse_prices(["prompt=0.5", "replica_hour=2"]) == Prices(prompt=0.5, replica_hour=2)
    assert parse_prices([]) is None
