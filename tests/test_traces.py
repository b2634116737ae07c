"""What whoever watches a cluster sees of requests: spans, by OpenTelemetry's own protocol, and structured logs."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from ray import serve

from pipelines.traces import Traces
from schemas.requests import Timing
from schemas.settings import EngineSettings
from tests.conftest import ROOT, write_lines
from tests.deterministic import Starts
from tests.endpoint import deploy

WORD = "xylophone"


class Collector:
    """Takes what is sent to an OTLP collector over HTTP."""

    def __init__(self):
        self.bodies = []

    def spans(self):
        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found

    def wait_for(self, number):
        """The spans without a parent of ours, once there are so many, and those below each."""
        until = time.monotonic() + 30
        while True:
            spans = self.spans()
            ids = {span.span_id for span in spans}
            roots = [span for span in spans if span.parent_span_id not in ids]
            if len(roots) >= number or time.monotonic() > until:
                return roots, {r.span_id: [s for s in spans if s.parent_span_id == r.span_id] for r in roots}
            time.sleep(0.2)


@pytest.fixture
def collector(monkeypatch):
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    yield collector
    server.shutdown()
    server.server_close()


def said(span):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_each_request_of_a_run_is_a_span_that_names_its_row(tmp_path, score, collector):
    lines = [{"prompt": f"{WORD} {n}", "request_id": f"r{n}"} for n in range(5)]
    same = [{"prompt": f"{WORD} same", "temperature": 0, "request_id": f"s{n}"} for n in range(3)]
    path = write_lines(tmp_path / "a.jsonl", *lines, *same, {"prompt": "fail", "request_id": "f"})
    run = score(path)
    # Rows that one answer is for are one request.
    roots, _ = collector.wait_for(7)
    assert len(roots) == 7
    told = {said(root)["overnight.row_id"]: root for root in roots}
    assert {*told} == {"r0", "r1", "r2", "r3", "r4", "s0", "f"}
    for name, root in told.items():
        about = said(root)
        assert about["overnight.run_id"] == run.summary.run_id and about["gen_ai.operation.name"] == "text_completion"
        assert about["overnight.row"].startswith(f"{path}:") and root.start_time_unix_nano <= root.end_time_unix_nano
        if name == "f":
            assert (about["error.type"], about["http.response.status_code"]) == ("asked_to_fail", 400)
            continue
        row = next(row for row in run.table("usage").to_pylist() if row["id"] == name)
        assert about["gen_ai.usage.input_tokens"] == row["prompt_tokens"]
        assert about["gen_ai.usage.output_tokens"] == row["completion_tokens"]
    assert not any(WORD.encode() in body for body in collector.bodies)


PHASES = [
    (Timing(10.0, 30.0, 100.0), {"queue": 10, "prefill": 20, "decode": 70}),
    # Of beams it isn't known when they had their first token.
    (Timing(10.0, None, 100.0), {"queue": 10}),
    (Timing(None, None, 100.0), {}),
]


@pytest.mark.parametrize(("timing", "lasted"), PHASES)
def test_phases_follow_one_another_up_to_the_requests_end(collector, timing, lasted):
    traces = Traces()
    traces.record("/v1/chat/completions", timing, time.time() - 0.1, {"prompt_tokens": 3}, {"overnight.row": "a:1"})
    traces.close()
    (root,), below = collector.wait_for(1)
    phases = below[root.span_id]
    assert (root.name, said(root)["gen_ai.usage.input_tokens"]) == ("chat", 3)
    assert {one.name: round((one.end_time_unix_nano - one.start_time_unix_nano) / 1e6) for one in phases} == lasted
    for first, then in itertools.pairwise(phases):
        assert first.end_time_unix_nano == then.start_time_unix_nano
    assert not phases or abs(phases[0].start_time_unix_nano - root.start_time_unix_nano) < 50e6
    assert len(phases) < 3 or phases[-1].end_time_unix_nano == root.end_time_unix_nano


def test_without_a_collector_nothing_is_recorded_nor_loaded(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    script = "import sys; from pipelines.traces import Traces; Traces(); print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_request_of_the_endpoint_is_a_span_of_its_callers_trace(served_port, collector):
    endpoint = deploy(
        "traced", served_port, Starts(), served_names=("test",), engine=EngineSettings(cores=1), replicas=1
    )
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    named = {"traceparent": f"00-{trace}-{parent}-01", "X_Request_ID": "mine"}
    assert endpoint.post({"prompt": f"{WORD} 1"}, **named).status_code == 200
    assert endpoint.post({"prompt": "fail"}).status_code == 400
    assert endpoint.post({"prompt": "a", "n": "x"}).status_code == 422
    roots, _ = collector.wait_for(3)
    serve.delete("traced")
    assert Counter(said(root).get("error.type") for root in roots) == {None: 1, "asked_to_fail": 1, "schema": 1}
    (mine,) = [root for root in roots if said(root)["overnight.request_id"] == "mine"]
    assert (mine.trace_id.hex(), mine.parent_span_id.hex()) == (trace, parent)
    assert not any(WORD.encode() in body for body in collector.bodies)


LOGGED = """
import sys
sys.path.insert(0, {root!r})
from jobs.options import choose_log_format
choose_log_format("json")
from jobs.console import RunView
from pipelines import batch
from schemas.settings import RunSettings
from tests.deterministic import Starts
with RunView() as view:
    batch.run(RunSettings(inputs=({path!r},), output={out!r}, served_names=("test",)), view, Starts())
"""


def test_structured_logs_are_objects_with_the_ids_of_run_and_row_and_without_prompts(tmp_path):
    lines = [{"prompt": f"{WORD} {n}"} for n in range(3)]
    path = write_lines(tmp_path / "a.jsonl", *lines, {"prompt": f"{WORD} fail", "request_id": "seven"})
    script = LOGGED.format(root=str(ROOT), path=str(path), out=str(tmp_path / "out"))
    # The paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="logs") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        logs = [file.read_text() for file in Path(folder).glob("ray/session_2*/logs/worker-*.err")]
    told = [json.loads(line) for line in done.stderr.splitlines()]
    run_id = json.loads((tmp_path / "out" / "manifest.json").read_text())["run_id"]
    ours = [line for line in told if line.get("run_id")]
    assert {line["run_id"] for line in ours} == {run_id}
    (published,) = [line for line in ours if line["message"] == "published"]
    assert published["rows"]["input"] == 4
    assert "publishing" in {line["message"] for line in ours}
    (failed,) = [
        json.loads(line) for log in logs for line in log.splitlines() if line.startswith("{") and "row failed" in line
    ]
    assert failed["run_id"] == run_id and (failed["row_id"], failed["row"]) == ("seven", f"{path}:4")
    assert failed["reason"] == "asked_to_fail"
    assert not any(WORD in log for log in [done.stderr, *logs])
