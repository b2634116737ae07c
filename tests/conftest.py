"""What tests share: one Ray, one real engine, one run of the demo."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import batch
from pipelines.engine import VllmEngine
from pipelines.manifest import Summary
from pipelines.model import resolve
from pipelines.progress import Progress
from schemas.requests import Answered, Failed, Request
from schemas.settings import EngineSettings, RunSettings
from tests.deterministic import Starts

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "jobs" / "demo.jsonl"


class Silence:
    """A Show that keeps what it was told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.seen: list[Progress] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def checked(self, num_rows: int) -> None:
        pass

    def progress(self, now: Progress) -> None:
        self.seen.append(now)


@dataclass(frozen=True)
class Run:
    """A published run, and how it was told."""

    output: Path
    summary: Summary
    show: Silence

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.output / "manifest.json").read_text())

    def table(self, name: str) -> pa.Table:
        return read_table(self.output, name)


def read_table(output: Path, name: str) -> pa.Table:
    """One published table of the current run, read from the files of its manifest."""
    manifest = json.loads((output / "manifest.json").read_text())
    folder = output / "runs" / manifest["run_id"]
    paths = [folder / file["path"] for file in manifest["files"] if file["path"].startswith(f"{name}/")]
    return pa.concat_tables(pq.read_table(path) for path in paths)


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
def ray_cluster() -> Iterator[None]:
    """A Ray of this session's own, so that the many runs of the tests don't start one each."""
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def score(tmp_path: Path, ray_cluster: None) -> Callable[..., Run]:
    """Runs the batch door over inputs with the deterministic engine."""

    def run(*inputs: Path, start: Any = None, output: Path | None = None, **settings: Any) -> Run:
        show = Silence()
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
