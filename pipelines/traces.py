"""Traces: one span a request, and below it its wait, its prefill and its decoding; by OpenTelemetry.

They are sent to where OpenTelemetry's own variables say (OTEL_EXPORTER_OTLP_ENDPOINT, or that of traces alone). Where
these say nothing, nothing is recorded, and the library isn't loaded. No prompt and no answer is in a span.
"""

import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from schemas.dialects import engine_endpoint
from schemas.failures import Failure
from schemas.requests import Endpoint, Timing

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# By the semantic conventions for generative AI.
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
_FLUSH_MS = 5_000


def environment() -> dict[str, str]:
    """OpenTelemetry's variables, for processes elsewhere. Headers hold secrets, and what processes are started with can
    be read in Ray's dashboard: they have to be set on the nodes."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_") and "HEADERS" not in name}


class Traces:
    """Where a process sends the spans of its requests."""

    def __init__(self) -> None:
        self._provider = _provider() if any(os.environ.get(name) for name in _ENDPOINTS) else None
        self._tracer = self._provider.get_tracer("overnight") if self._provider is not None else None

    def record(
        self,
        endpoint: Endpoint,
        end: Timing | Failure,
        began: float,
        usage: Mapping[str, Any],
        attributes: Mapping[str, str | int] | Mapping[str, str | bool],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Record a request that has come to its end now.

        `end`: its times, or why it failed. `began`: `time.time()` at which it came. `headers`: of HTTP, in which the
        span that it is part of may be named.
        """
        if self._tracer is None:
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        ended, operation = time.time(), _OPERATIONS[engine_endpoint(endpoint)]
        said: dict[str, str | int | bool] = {"gen_ai.operation.name": operation, "url.path": endpoint, **attributes}
        for name, field in (("input", "prompt_tokens"), ("output", "completion_tokens")):
            if usage.get(field) is not None:
                said[f"gen_ai.usage.{name}_tokens"] = usage[field]
        span = self._tracer.start_span(
            operation, extract(headers), SpanKind.SERVER, attributes=said, start_time=_ns(began)
        )
        if isinstance(end, Failure):
            span.set_attribute("error.type", end.reason)
            span.set_attribute("http.response.status_code", end.status_code)
            span.set_status(Status(StatusCode.ERROR, end.reason))
        else:
            below = set_span_in_context(span)
            for name, start, stop in _phases(end, ended):
                self._tracer.start_span(name, below, start_time=_ns(start)).end(_ns(stop))
        span.end(_ns(ended))

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MS)
            self._provider.shutdown()


def _phases(timing: Timing, ended: float) -> list[tuple[str, float, float]]:
    """What is known of a request's phases: name, begin and end of each, by the clock of `ended`."""
    if timing.queue_ms is None:
        return []
    began = ended - timing.total_ms / 1000
    begun = min(ended, began + timing.queue_ms / 1000)
    if timing.first_token_ms is None:
        return [("queue", began, begun)]
    first = min(ended, began + timing.first_token_ms / 1000)
    return [("queue", began, begun), ("prefill", begun, first), ("decode", first, ended)]


def _provider() -> Any:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "overnight"}
    # Of its own: the process-wide one belongs to Ray, Serve and vLLM, which have spans of theirs.
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider


def _exporter() -> Any:
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
