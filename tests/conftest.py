"""What tests share: one Ray, one real engine, one run of the demo."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import batch
from pipelines.manifest import Summary
from pipelines.model import resolve
from pipelines.progress import Progress
from pipelines.storage import Folder
from pipelines.vllm_engine import VllmEngine
from pipelines.write import read_manifest
from schemas.requests import Answered, Failed, Request
from schemas.settings import EngineSettings, RunSettings
from tests.deterministic import Starts
from tests.endpoint import HOST, free_port
from tests.s3 import FaultyS3, serving

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "jobs" / "demo.jsonl"


class Silence:
    """A Show that keeps what it was told, and may ask a run to drain."""

    def __init__(self, drain_at: int | None = None) -> None:
        """`drain_at`: a person asks to end the run once so many rows are done."""
        self._drain_at = drain_at
        self._draining: threading.Event | None = None
        self.phases: list[str] = []
        self.seen: list[Progress] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def checked(self, num_rows: int) -> None:
        pass

    def progress(self, now: Progress) -> None:
        self.seen.append(now)
        if self._draining is not None and self._drain_at is not None and now.done.num_done >= self._drain_at:
            self._draining.set()

    @contextmanager
    def drains(self, draining: threading.Event) -> Iterator[None]:
        self._draining = draining
        yield


@dataclass(frozen=True)
class Run:
    """A published run, and how it was told."""

    output: Path | str
    summary: Summary
    show: Silence

    @property
    def manifest(self) -> dict[str, Any]:
        return read_published(self.output)

    def table(self, name: str) -> pa.Table:
        return read_table(self.output, name)


def read_published(output: Path | str) -> dict[str, Any]:
    """The current run's manifest; of a folder or of a URI."""
    manifest = read_manifest(Folder.at(str(output)))
    assert manifest is not None
    return manifest


def read_table(output: Path | str, name: str) -> pa.Table:
    """One published table of the current run, read from the files of its manifest."""
    manifest = read_published(output)
    folder = Folder.at(str(output)).join("runs", manifest["run_id"])
    tables = []
    for file in manifest["files"]:
        if file["path"].startswith(f"{name}/"):
            with folder.open(file["path"]) as stream:
                tables.append(pq.read_table(stream))
    return pa.concat_tables(tables)


def write_lines(path: Path, *lines: Any) -> Path:
    """A JSONL file: dicts as JSON, strings as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The demo first: its engine takes all cores for itself, and so does the shared one, until the session ends."""
    items.sort(key=lambda item: "demo" not in getattr(item, "fixturenames", ()))


@pytest.fixture
def own_core_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core claims of this test's own, beside those of engines that run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[FaultyS3]:
    """An S3 server, to which this process and its children are directed by the usual environment."""
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    with serving() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "AWS_ENDPOINT_URL": s3.url}.items():
            patch.setenv(name, value)
        yield s3


@pytest.fixture(scope="session")
def ray_cluster(s3_server: FaultyS3) -> Iterator[None]:
    """A Ray of this session's own, so that the many runs of the tests don't start one each."""
    import ray

    from pipelines.serve import prepare

    prepare()
    with pytest.MonkeyPatch.context() as patch:
        # Its worker processes are kept from one run to the next: to start one costs more than most runs here do.
        patch.setenv("RAY_num_workers_soft_limit", "6")
        patch.setenv("RAY_idle_worker_killing_time_threshold_ms", str(24 * 3600 * 1000))
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def served_port(ray_cluster: None) -> Iterator[int]:
    """A Ray Serve of this session's own, without applications; each test file adds its own."""
    from ray import serve

    port = free_port()
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port}, logging_config=quiet)
    yield port
    serve.shutdown()


@pytest.fixture
def score(tmp_path: Path, ray_cluster: None) -> Callable[..., Run]:
    """Runs the batch door over inputs with the deterministic engine."""

    def run(*inputs: Path | str, start: Any = None, output: Path | str | None = None, **settings: Any) -> Run:
        show = Silence(settings.pop("drain_at", None))
        out = output or tmp_path / "out"
        settings = {"served_names": ("test",), **settings}
        made = RunSettings(inputs=tuple(map(str, inputs)), output=str(out), **settings)
        return Run(out, batch.run(made, show, start or Starts()), show)

    return run


def engine_processes() -> list[psutil.Process]:
    """The processes of engines that this one started."""
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]


@pytest.fixture(scope="session")
def engine() -> Iterator[VllmEngine]:
    """The real engine on the embedded model: one for all tests. In float32, so that answers can be compared."""
    settings = EngineSettings(dtype="float32", max_num_seqs=64, kv_cache_gib=1)
    engine = VllmEngine.start(resolve(None), (), settings)
    yield engine
    processes = engine_processes()
    assert processes
    engine.close()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, f"the engine left processes behind: {alive}"


@pytest.fixture
def complete(engine: VllmEngine) -> Callable[..., Answered | Failed]:
    """Sends one completion body to the real engine."""

    def send(**body: Any) -> Answered | Failed:
        request = Request("test", "/v1/completions", json.dumps(body))
        return engine.submit(request, lane="batch").result(timeout=300)

    return send


@dataclass(frozen=True)
class Command:
    """A finished command line."""

    status: int
    out: str
    err: str


def overnight(*arguments: str, timeout: float = 600, **environment: str) -> Command:
    """Run `overnight` as a user does."""
    done = subprocess.run(
        [Path(sys.executable).parent / "overnight", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Command(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class DemoRun:
    command: Command
    output: Path


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """The demo, run by the console command on the real engine, on a Ray of its own."""
    output = tmp_path_factory.mktemp("demo") / "out"
    return DemoRun(overnight("score", "--input", str(DEMO.relative_to(ROOT)), "--output", str(output)), output)
