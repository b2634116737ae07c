"""Runs through an endpoint: its engines answer, people at it go first, and nothing is lost when one of them dies."""

import threading
import time

import pytest
import ray
from ray import serve
from typer.testing import CliRunner

from jobs import score as verb
from jobs.exits import ExitStatus
from pipelines import batch, forecast, through
from schemas.failures import Interrupted, UsageError
from schemas.settings import Bounds, EngineSettings, RunSettings
from tests.conftest import Run, Silence, write_lines
from tests.deterministic import Starts
from tests.endpoint import deploy


@pytest.fixture(scope="module")
def endpoint(served_port):
    yield deploy(
        "shared",
        served_port,
        Starts(),
        served_names=("test",),
        engine=EngineSettings(cores=1, max_num_seqs=64, batch_share=0.25),
        replicas=1,
        bounds=Bounds(max_ongoing_requests=32),
    )
    serve.delete("shared")


def run_through(tmp_path, *lines, drain_at=None, **settings):
    path, output = tmp_path / "a.jsonl", tmp_path / "out"
    if not path.exists():
        write_lines(path, *lines)
    made = RunSettings(inputs=(str(path),), output=str(output), **{"through": "serve:shared", **settings})
    show = Silence(drain_at)
    return Run(output, batch.run(made, show), show)


def test_the_endpoints_engines_answer_as_the_runs_own_would(tmp_path, endpoint, score):
    lines = [{"prompt": f"row {n}", "request_id": f"{n}"} for n in range(40)]
    lines += [{"prompt": "fail"}, "broken", {"messages": [{"role": "user", "content": "one two"}]}]
    run = run_through(tmp_path, *lines)
    own = score(tmp_path / "a.jsonl", output=tmp_path / "own", engine=EngineSettings(cores=1), replicas=1)
    for name, columns in {"responses": ["id", "text", "model", "fingerprint"], "errors": ["reason", "message"]}.items():
        assert run.table(name).select(columns) == own.table(name).select(columns)
    assert run.manifest["rows"] == own.manifest["rows"] and run.manifest["rows"]["input"] == 43
    assert run_through(tmp_path, *lines).summary.is_repeat


def test_a_person_is_answered_while_a_run_fills_what_it_may(tmp_path, endpoint):
    lines = [{"prompt": f"slow:1 row {n}"} for n in range(80)]
    errors = []

    def work():
        try:
            run_through(tmp_path, *lines)
        except Exception as error:
            errors.append(error)

    running = threading.Thread(target=work)
    running.start()
    until = time.monotonic() + 60
    while endpoint.num_running() < 16 and time.monotonic() < until:
        time.sleep(0.1)
    # Half of what the engine takes at a time.
    assert endpoint.num_running() == 16
    for _ in range(5):
        assert endpoint.post({"prompt": "now"}).status_code == 200
        assert endpoint.num_running() <= 16
    running.join(timeout=120)
    assert not running.is_alive() and not errors


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_goes_on_later_without_it(tmp_path, endpoint, score):
    lines = [{"prompt": f"slow:0.3 row {n}", "request_id": f"{n}"} for n in range(100)]
    with pytest.raises(Interrupted, match=r"\d+ of 100 rows are left"):
        run_through(tmp_path, *lines, drain_at=10)
    run = score(tmp_path / "a.jsonl", engine=EngineSettings(cores=1), replicas=1)
    assert run.table("responses")["id"].to_pylist() == [f"{n}" for n in range(100)]
    assert run.manifest["computed"]["rows"] < 100


@pytest.mark.slow
def test_rows_of_an_engine_that_dies_are_answered_by_the_one_in_its_place(tmp_path, endpoint):
    mark = tmp_path / "died"
    lines = [{"prompt": f"slow:0.2 row {n}", "request_id": f"{n}"} for n in range(40)]
    run = run_through(tmp_path, *lines, {"prompt": f"exit:{mark}", "request_id": "killer"})
    assert mark.exists() and run.table("errors").num_rows == 0
    assert sorted(run.table("responses")["id"].to_pylist()) == sorted([*(f"{n}" for n in range(40)), "killer"])


def test_a_forecast_goes_by_the_endpoint(tmp_path, endpoint):
    path = write_lines(tmp_path / "a.jsonl", *[{"prompt": f"row {n}"} for n in range(20)])
    made = RunSettings(inputs=(str(path),), output=str(tmp_path / "out"), through="serve:shared")
    told = forecast.forecast(made, Silence())
    assert (told.num_rows, told.num_replicas) == (20, 1) and not list(tmp_path.glob("out/*/*"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"through": "serve:other"}, r"^--through serve:other: no endpoint of this name .* there are: .*shared"),
        ({"model": "x"}, "^--model: found it beside --through, where the endpoint's own is taken"),
        ({"engine": EngineSettings(max_num_seqs=4)}, "^--engine: found it beside --through"),
        ({"replicas": 2}, "^--replicas: found it beside --through"),
    ],
)
def test_what_doesnt_go_with_an_endpoint_is_named(tmp_path, endpoint, settings, words):
    with pytest.raises(UsageError, match=words):
        run_through(tmp_path, {"prompt": "a"}, **settings)
    assert not (tmp_path / "out").exists()


def test_a_cluster_without_a_free_core_is_refused_rather_than_waited_for(tmp_path, endpoint, monkeypatch):
    @ray.remote
    class Holder:
        def holds(self):
            return True

    monkeypatch.setattr(through, "_TAKEN_S", 1.0)
    holder = Holder.options(num_cpus=int(ray.available_resources()["CPU"])).remote()
    assert ray.get(holder.holds.remote())
    try:
        with pytest.raises(UsageError, match=r"^--through: all \d+ CPU cores of the cluster are taken, and checking"):
            run_through(tmp_path, {"prompt": "a"})
    finally:
        ray.kill(holder)


@pytest.mark.parametrize("given", ["shared", "serve:", "http://localhost:8000"])
def test_an_endpoint_is_named_by_its_application(tmp_path, given):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    done = CliRunner().invoke(verb.app, ["--input", str(path), "--output", str(tmp_path / "o"), "--through", given])
    assert done.exit_code == ExitStatus.USAGE and f"--through {given}: expected serve:APP" in done.output
