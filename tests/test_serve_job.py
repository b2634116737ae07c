"""`overnight serve`, as a person starts it."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from jobs import serve
from jobs.exits import ExitStatus
from schemas.failures import UsageError
from schemas.settings import make_serve_settings
from tests.conftest import ROOT, overnight
from tests.endpoint import free_port


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0: without keys everybody"),  # noqa: S104 - what is refused
        (("--bound", "no_such=1"), "--bound no_such: no such bound"),
        (("--bound", "max_body_bytes=1"), "--bound max_body_bytes=1"),
        (("--replicas", "4-2"), "fewer than min_replicas"),
        (("--replicas", "some"), "--replicas some: expected"),
        (("--root", "v1"), "root: found 'v1'"),
        (("--keys", "nowhere.yaml"), "--keys nowhere.yaml: it can't be read"),
        (("--new-key", "a b"), "--new-key a b: expected a name"),
    ],
)
def test_wrong_usage_says_which_flag_and_starts_nothing(arguments, words):
    done = overnight("serve", *arguments)
    assert done.status == ExitStatus.USAGE and words in done.err and len(done.err.splitlines()) == 1


def test_a_new_key_is_printed_with_its_entry(tmp_path):
    done = overnight("serve", "--new-key", "batch-team")
    assert done.status == ExitStatus.OK
    path = tmp_path / "keys.yaml"
    path.write_text(done.out)
    key = done.out.splitlines()[0].rpartition(" ")[2]
    (entry,) = serve._find_keys(path)
    assert entry.role == "batch-team" and key not in entry.digest


def test_a_key_of_the_environment_is_taken(monkeypatch):
    monkeypatch.setenv("OVERNIGHT_API_KEY", "x" * 32)
    assert [key.role for key in serve._find_keys(None)] == ["default"]
    monkeypatch.setenv("OVERNIGHT_API_KEY", "short")
    with pytest.raises(UsageError, match="OVERNIGHT_API_KEY"):
        serve._find_keys(None)


def test_the_configuration_file_is_one_that_serve_takes():
    config = yaml.safe_load((ROOT / "jobs" / "serve.yaml").read_text())
    (application,) = ServeDeploySchema(**config).applications
    arguments = {name: value for name, value in application.args.items() if name != "keys"}
    assert make_serve_settings(arguments).replicas.max_replicas > 1
    module, _, name = application.import_path.partition(":")
    assert module == serve.__name__ and callable(getattr(serve, name))


@pytest.fixture
def claims():
    """A folder for a process's own claims of cores; of a short path, since Ray puts its sockets there."""
    with tempfile.TemporaryDirectory(prefix="o", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, ExitStatus.TERMINATED), (signal.SIGINT, ExitStatus.INTERRUPTED)]
)
def test_a_signal_lets_what_is_under_way_end_and_leaves_nothing_behind(claims, sent, status):
    port = free_port()
    command = [Path(sys.executable).parent / "overnight", "serve", "--port", str(port), "--engine", "kv_cache_gib=0.5"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": claims}, **quiet)
    try:
        ready = process.stdout.readline()
        assert ready == f"ready: http://127.0.0.1:{port}/v1/completions\n", process.stderr.read()
        assert "curl http://127.0.0.1" in process.stdout.readline()
        below = psutil.Process(process.pid).children(recursive=True)
        told = []
        body = {"prompt": "Once", "max_tokens": 30, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        client = threading.Thread(target=lambda: told.append(httpx.post(url, json=body, timeout=120)))
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            client.start()
            threading.Event().wait(1)
            process.send_signal(sent)
            assert "data: [DONE]" in list(lines)
        client.join()
        assert told[0].json()["usage"]["completion_tokens"] == 30
        assert process.wait(90) == status
        assert len(process.stderr.read().splitlines()) == 1
        _, alive = psutil.wait_procs(below, timeout=5)
        assert not alive
    finally:
        process.kill()
        process.wait()
