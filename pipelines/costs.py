"""Costs: what a run has cost, and what one is going to take, by an earlier run of the same model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.order import PROMPT_COST
from schemas.plans import Totals
from schemas.requests import Tally
from schemas.settings import Prices

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Experience:
    """What an earlier run of the same model tells: of its answers, and of its speed."""

    run_id: str
    # Tokens of its answers, of those that they might have had.
    answer_share: float
    # Work (`pipelines/order.py`) that a replica did in a second.
    work_per_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan is going to take. Tokens are at most so many where no earlier run tells; seconds are then unknown."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float | None = None
    cost: float | None = None


def cost_of(tally: Tally, prices: Prices, replica_hours: float) -> float:
    """What has been computed, at these prices. Rows that were answered by another's answer cost nothing."""
    prompt_tokens = tally.prompt_tokens - tally.deduplicated_prompt_tokens
    return _cost(prices, prompt_tokens, tally.cached_tokens, tally.computed_tokens, replica_hours)


def experience_of(manifest: Mapping[str, Any] | None, identities: Mapping[str, str]) -> Experience | None:
    """What a run's manifest tells; None where there is none, of another model or version, or that computed nothing."""
    if manifest is None or "computed" not in manifest:
        return None
    computed, seconds = manifest["computed"], manifest["timings_s"]["infer"] * manifest["replicas"]
    is_same = manifest["model"]["identities"].get("") == identities.get("")
    if not is_same or not seconds or not computed["completion_tokens"]:
        return None
    work = computed["completion_tokens"] + PROMPT_COST * (computed["prompt_tokens"] - computed["cached_tokens"])
    # What was expected of the same rows: all their work but that of their prompts.
    at_most = computed["work"] - PROMPT_COST * computed["prompt_tokens"]
    share = computed["completion_tokens"] / max(computed["completion_tokens"], at_most)
    return Experience(manifest["run_id"], share, work / seconds)


def estimate(totals: Totals, num_replicas: int, experience: Experience | None, prices: Prices | None) -> Estimate:
    """What a plan is going to take on so many replicas."""
    asked = totals.prompt_tokens - totals.repeated_tokens
    share = experience.answer_share if experience is not None else 1.0
    answers = round(totals.computed_tokens * share)
    seconds = None
    if experience is not None and experience.work_per_s:
        work = answers + PROMPT_COST * (asked - totals.shared_tokens)
        seconds = work / experience.work_per_s / max(1, num_replicas)
    cost = None
    if prices is not None and (seconds is not None or not prices.replica_hour):
        cost = _cost(prices, asked, totals.shared_tokens, answers, num_replicas * (seconds or 0.0) / 3600)
    return Estimate(asked, totals.shared_tokens, answers, seconds, cost)


@dataclass(frozen=True, slots=True)
class Item:
    """A line of a bill: so much of something, at a price each `unit`."""

    name: str
    number: float
    unit: int
    price: float

    @property
    def cost(self) -> float:
        return self.number / self.unit * self.price


def bill_of(manifest: Mapping[str, Any]) -> list[Item]:
    """What the cost of a run is made of, by its manifest; nothing where no prices were given."""
    if manifest["cost"] is None:
        return []
    computed, prices = manifest["computed"], Prices(**manifest["settings"]["prices"])
    hours = manifest["replicas"] * manifest["timings_s"]["infer"] / 3600
    return _bill(prices, computed["prompt_tokens"], computed["cached_tokens"], computed["completion_tokens"], hours)


def _bill(prices: Prices, prompt: int, cached: int, completion: int, replica_hours: float) -> list[Item]:
    return [
        Item("prompt tokens", prompt - cached, _MILLION, prices.prompt),
        Item("cached prompt tokens", cached, _MILLION, prices.prompt if prices.cached is None else prices.cached),
        Item("completion tokens", completion, _MILLION, prices.completion),
        Item("replica hours", replica_hours, 1, prices.replica_hour),
    ]


def _cost(prices: Prices, prompt: int, cached: int, completion: int, replica_hours: float) -> float:
    return round(sum(item.cost for item in _bill(prices, prompt, cached, completion, replica_hours)), 6)
