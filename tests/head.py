"""A cluster's head for tests, as `ray start --head` starts it: on ports of its own, with a dashboard and a token."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.conftest import ROOT
from tests.endpoint import HOST, free_port

BIN = Path(sys.executable).parent
# Whatever this process was told, or has been told by a Ray of its own.
_OF_RAY = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# What a launcher's configuration lists, and nodes that aren't started by it don't need.
_COMMANDS = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


@dataclass(frozen=True)
class Head:
    url: str
    address: str
    # What a person's shell has.
    environment: Mapping[str, str]

    def run(self, *command: str, cwd: Path = ROOT, timeout: float = 180, **more: str) -> subprocess.CompletedProcess:
        """A command as a person gives it who has the cluster's address and token; both of its streams are read."""
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def job(self, job: str) -> dict[str, Any]:
        """What the cluster says of a job."""
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        return httpx.get(f"{self.url}/api/jobs/{job}", headers=token, timeout=30).raise_for_status().json()

    def wait_until_ended(self, job: str, seconds: float = 60) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while (info := self.job(job))["status"] in ("PENDING", "RUNNING") and time.monotonic() < until:
            time.sleep(0.1)
        return info


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what Ray put there, with our commands first, and the deterministic engine."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
    path = f"{BIN}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT / "tests" / "site"), "PYTHONSAFEPATH": "", **more}


@contextmanager
def started_head(num_cpus: int = 2, autoscaling: dict[str, Any] | None = None, **environment: str) -> Iterator[Head]:
    """For as long as the block lasts. A token is known, and nothing is said of the mode, as on many a machine.

    `autoscaling`: a launcher's configuration, whose workers are nodes that Ray pretends to start.
    """
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        shell = clean_environment(RAY_AUTH_TOKEN=secrets.token_hex(16), RAY_USAGE_STATS_ENABLED="0", **environment)
        given = {
            "port": port,
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": free_port(),
            "ray-client-server-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "temp-dir": folder,
            "num-cpus": num_cpus,
            "object-store-memory": 200_000_000,
        }
        if autoscaling is not None:
            provider = {"type": "fake_multinode", "gcs_address": f"{HOST}:{port}"}
            nothing = {name: [] for name in _COMMANDS} | {"auth": {}, "file_mounts": {}, "upscaling_speed": 1.0}
            file = Path(folder) / "autoscaling.json"
            file.write_text(json.dumps({**nothing, **autoscaling, "provider": provider}))
            given["autoscaling-config"] = file
        flags = [f"--{name}={value}" for name, value in given.items()]
        command = [BIN / "ray", "start", "--head", "--block", "--disable-usage-stats", *flags]
        with (Path(folder) / "start.log").open("w") as said:
            process = subprocess.Popen(command, cwd=folder, env=shell, stdout=said, stderr=subprocess.STDOUT)
        try:
            url = f"http://{HOST}:{dashboard}"
            _wait_until_up(url, process, Path(said.name))
            # The cluster doesn't have what a person has here.
            own = {"PYTHONPATH": f"{shell['PYTHONPATH']}{os.pathsep}{ROOT}", "RAY_API_SERVER_ADDRESS": url}
            yield Head(url, f"{HOST}:{port}", {**shell, **own})
        finally:
            below = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for one in below:
                one.kill()
            process.wait()
            psutil.wait_procs(below, timeout=10)


def _wait_until_up(url: str, process: subprocess.Popen, said: Path) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        assert process.poll() is None, said.read_text()
        try:
            if httpx.get(f"{url}/api/version", timeout=5).status_code in (200, 401):
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError(said.read_text())
