"""What runs and the endpoint count, through Ray's metrics: each process is scraped, and Ray adds which one it is."""

from collections.abc import Mapping
from typing import Any

from ray.util import metrics

from pipelines.engine import EngineState

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]


class DoorMeters:
    """Of an ingress."""

    def __init__(self) -> None:
        self.requests = metrics.Counter(
            "overnight_requests",
            "Requests that came to their end, by status, reason of the failure (or none), role and whether streamed.",
            ("route", "status", "reason", "role", "stream"),
        )
        self.tokens = TokenMeter()
        self.in_flight = metrics.Gauge("overnight_in_flight", "Requests that are under way.")
        self.first_token = metrics.Histogram(
            "overnight_first_token_seconds", "From a request's arrival to its first streamed token.", _SECONDS
        )
        self.inter_token = metrics.Histogram(
            "overnight_inter_token_seconds", "Between two chunks of one stream.", _SECONDS
        )
        self.total = metrics.Histogram("overnight_request_seconds", "From a request's arrival to its end.", _SECONDS)


class RowMeters:
    """Of a replica of a run."""

    def __init__(self) -> None:
        self.rows = metrics.Counter(
            "overnight_rows", "Rows that are done, by outcome: answered, or the reason of the failure.", ("outcome",)
        )
        self.tokens = TokenMeter()
        self.total = metrics.Histogram(
            "overnight_row_seconds", "From a row's request being handed to its engine to its answer.", _SECONDS
        )


class TokenMeter:
    """Tokens, at both doors."""

    def __init__(self) -> None:
        self.metric = metrics.Counter("overnight_tokens", "Tokens of answered requests.", ("kind",))

    def count(self, usage: Mapping[str, Any]) -> None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        told = {
            "prompt": usage.get("prompt_tokens"),
            "completion": usage.get("completion_tokens"),
            "cached": cached,
            "search": usage.get("search_tokens"),
        }
        for kind, number in told.items():
            if number:
                self.metric.inc(number, {"kind": kind})


class EngineMeters:
    """Of an engine, at both doors."""

    def __init__(self) -> None:
        self._running = metrics.Gauge("overnight_engine_running", "Sequences in the engine.")
        self._waiting = metrics.Gauge("overnight_engine_waiting", "Prompts that wait before the engine.")
        self._kv = metrics.Gauge("overnight_engine_kv_share", "Share of the KV cache in use.")
        self._batch = metrics.Gauge("overnight_engine_batch", "Sequences of batch requests in the engine.")
        self._budget = metrics.Gauge("overnight_engine_batch_budget", "Batch sequences that may be in the engine.")
        self._left_out = metrics.Gauge(
            "overnight_engine_left_out", "Batch sequences that the engine's last step left out for people."
        )
        self._set_aside = metrics.Counter(
            "overnight_engine_set_aside", "Batch requests that left the engine for people."
        )
        self._lost = metrics.Counter("overnight_engine_lost_tokens", "Tokens of answers that were given up for people.")
        self._shown = EngineState()

    def show(self, state: EngineState) -> None:
        self._running.set(state.num_running)
        self._waiting.set(state.num_waiting)
        self._kv.set(state.kv_share)
        self._batch.set(state.num_batch)
        self._budget.set(state.batch_budget)
        self._left_out.set(state.num_left_out)
        _raise(self._set_aside, self._shown.num_set_aside, state.num_set_aside)
        _raise(self._lost, self._shown.num_lost_tokens, state.num_lost_tokens)
        self._shown = state


def _raise(counter: metrics.Counter, before: int, now: int) -> None:
    # An engine that was started again begins at nothing.
    if (number := now - (before if now >= before else 0)) > 0:
        counter.inc(number)
