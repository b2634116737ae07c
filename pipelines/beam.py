"""Beam search: the algorithm alone. It is given next-token log-probabilities and knows nothing of an engine.

A live beam is extended by its `2 * width` best continuations. A continuation that ends (a token that ends an answer, a
stop string) is finished, whatever its rank; the best `width` of the others live on. Of the finished ones the best
`width` are kept. Scores divide the summed log-probability by a power of the length, prompt included and the ending
token not, as vLLM's beam search does: so a request ranks its answers here as it does there. (Transformers counts the
answer alone; `length_penalty: 0` is the same in both.)

The search ends early, and exactly: a beam that couldn't enter the kept ones even if all its further tokens were
certain is dropped at once, and so is everything that it would have led to. What is returned is what the full search
to `max_tokens` returns.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, Protocol

# A token's log-probability, by token id. Of one position; the likeliest tokens, not all.
Logprobs = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What a request says of its search. Lengths are tokens."""

    width: int
    max_tokens: int
    # What the lengths that scores are divided by start from.
    prompt_length: int
    # Tokens that end an answer.
    end_token_ids: frozenset[int] = frozenset()
    # No answer ends before it has as many.
    min_tokens: int = 0
    length_penalty: float = 1.0
    # The stop string that the text of these tokens has come to with its last one; None: it goes on.
    find_stop: Callable[[Sequence[int]], str | None] | None = None
    # None: all.
    allowed_token_ids: frozenset[int] | None = None
    # Sequences of tokens whose last token may not follow the others.
    bad_words: tuple[tuple[int, ...], ...] = ()
    # Added to a token's log-probability; none lifts a token, or a search couldn't know when it is over.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Off: the full search, for tests.
    stop_early: bool = True

    def __post_init__(self) -> None:
        if any(bias > 0 for bias in self.logit_bias.values()) or min(self.presence_penalty, self.frequency_penalty) < 0:
            raise ValueError("a bias or penalty that lifts a token has no place in a beam search")

    def num_logprobs(self, num_tokens: int) -> int:
        """How many of the likeliest tokens a beam of `num_tokens` must know: as many as are looked at, and as many
        again as may be shifted or forbidden among them."""
        shifted = len(self.logit_bias) + len(self.bad_words)
        shifted += len(self.end_token_ids) if num_tokens < self.min_tokens else 0
        shifted += num_tokens if self.presence_penalty or self.frequency_penalty else 0
        return 2 * self.width + shifted


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A beginning of an answer. Its first tokens are those of `parent`; the root has none."""

    parent: "Beam | None" = None
    tokens: tuple[int, ...] = ()
    # Sum of its tokens' log-probabilities, shifted as the request wants it.
    cumulative: float = 0.0
    # What the model said at its last token's place.
    step: Logprobs = field(default_factory=dict)

    def steps(self) -> list[Logprobs]:
        """What the model said at each token's place, in order."""
        found: list[Logprobs] = []
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            found.append(beam.step)
            beam = beam.parent
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A whole answer. `score` is what it is ranked by; `stop_reason` the stop string or the token that ended it."""

    beam: Beam
    score: float
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None


class NextTokens(Protocol):
    """The model, as a search sees it."""

    async def next_tokens(self, beams: Sequence[Beam]) -> list[Logprobs]:
        """Log-probabilities of each beam's next token: the likeliest `BeamRules.num_logprobs`, or all allowed ones."""
        ...


class BeamSearch:
    """One search under way: `live` beams to extend, until there are none."""

    def __init__(self, rules: BeamRules) -> None:
        self._rules = rules
        self.live: list[Beam] = [Beam()] if rules.max_tokens > 0 else []
        # The best so far, the worst of them first; of equals, the one found first is better.
        self._kept: list[tuple[float, int, Hypothesis]] = []
        self._order = itertools.count(0, -1)

    def advance(self, steps: Sequence[Logprobs]) -> None:
        """Extend the live beams by one token each. `steps`: what the model says of each one's next token."""
        rules = self._rules
        found = [
            (beam.cumulative + shifted, token, beam, step)
            for beam, step in zip(self.live, steps, strict=True)
            for shifted, token in heapq.nlargest(2 * rules.width, self._continuations(beam, step), key=itemgetter(0))
        ]
        # Of equals, the one of the better beam comes first.
        found.sort(key=lambda candidate: -candidate[0])
        going_on: list[Beam] = []
        for cumulative, token, parent, step in found:
            beam = Beam(parent, (*parent.tokens, token), cumulative, step)
            if (stop := self._end_of(beam)) is not None:
                self._finish(beam, "stop", stop)
            elif len(going_on) < rules.width:
                if len(beam.tokens) == rules.max_tokens:
                    self._finish(beam, "length", None)
                going_on.append(beam)
        self.live = [
            beam for beam in going_on if len(beam.tokens) < rules.max_tokens and self._could_enter(self._bound(beam))
        ]

    def results(self) -> list[Hypothesis]:
        """The answers, best first: `width` of them, or as many as there are."""
        return [hypothesis for _, _, hypothesis in sorted(self._kept, key=lambda kept: kept[:2], reverse=True)]

    def _continuations(self, beam: Beam, step: Logprobs) -> Iterator[tuple[float, int]]:
        """The tokens that may follow a beam, with their log-probabilities as the request shifts them."""
        rules, tokens = self._rules, beam.tokens
        forbidden = {word[-1] for word in rules.bad_words if tokens[len(tokens) - len(word) + 1 :] == word[:-1]}
        if len(tokens) < rules.min_tokens:
            forbidden |= rules.end_token_ids
        is_penalised = bool(rules.presence_penalty or rules.frequency_penalty)
        for token, logprob in step.items():
            is_allowed = rules.allowed_token_ids is None or token in rules.allowed_token_ids
            if token in forbidden or not is_allowed or logprob == -math.inf:
                continue
            shift = rules.logit_bias.get(token, 0.0)
            if is_penalised and (count := tokens.count(token)):
                shift -= rules.presence_penalty + rules.frequency_penalty * count
            yield logprob + shift, token

    def _end_of(self, beam: Beam) -> int | str | None:
        """What ends an answer with this beam's last token."""
        if beam.tokens[-1] in self._rules.end_token_ids:
            return beam.tokens[-1]
        if self._rules.find_stop is not None and len(beam.tokens) > self._rules.min_tokens:
            return self._rules.find_stop(beam.tokens)
        return None

    def _finish(self, beam: Beam, reason: Literal["stop", "length"], stop: int | str | None) -> None:
        ended_by_token = isinstance(stop, int)
        score = self._score(beam.cumulative, len(beam.tokens) - ended_by_token)
        if self._could_enter(score):
            heapq.heappush(self._kept, (score, next(self._order), Hypothesis(beam, score, reason, stop)))
            if len(self._kept) > self._rules.width:
                heapq.heappop(self._kept)

    def _score(self, cumulative: float, num_tokens: int) -> float:
        length = float(max(1, self._rules.prompt_length + num_tokens))
        return cumulative / math.pow(length, self._rules.length_penalty)

    def _bound(self, beam: Beam) -> float:
        """No answer that begins with this beam scores higher: as if all tokens to come were certain."""
        if not self._rules.stop_early:
            return math.inf
        # A sum is never above 0, so the longest answer divides it best; by a negative power, the shortest.
        best = self._rules.max_tokens if self._rules.length_penalty >= 0 else len(beam.tokens)
        return self._score(beam.cumulative, best)

    def _could_enter(self, score: float) -> bool:
        return len(self._kept) < self._rules.width or score > self._kept[0][0]


async def search(rules: BeamRules, model: NextTokens) -> list[Hypothesis]:
    """The best answers by beam search, best first."""
    under_way = BeamSearch(rules)
    while under_way.live:
        under_way.advance(await model.next_tokens(under_way.live))
    return under_way.results()
