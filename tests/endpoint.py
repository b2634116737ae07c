"""An application that runs, for tests: on the session's Ray, with the deterministic engine or the real one."""

import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import psutil

from pipelines.engine import Engine
from pipelines.vllm_engine import EngineStart
from schemas.settings import EngineSettings, ServeSettings

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@cache
def _engine_of(name: str) -> Any:
    from ray import serve

    return serve.get_deployment_handle("Engine", name)


@dataclass(frozen=True)
class Endpoint:
    """One application; `url` ends before `/v1`."""

    name: str
    url: str

    def post(self, body: Any, timeout: float = 180, path: str = "/v1/completions", **headers: str) -> httpx.Response:
        """`body`: an object as JSON, or bytes as they are. Underscores in names of headers stand for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {"Content-Type": "application/json"}
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(f"{self.url}{path}", headers=kind | named, timeout=timeout, **sent)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60)

    def num_running(self) -> int:
        """Sequences in the engine, by its own word."""
        return int(_engine_of(self.name).ask.remote().result(timeout_s=30).num_running)

    def engine_cores(self) -> list[psutil.Process]:
        """The processes of engines of this session's Ray, of which this application's is the only one."""
        below = psutil.Process().children(recursive=True)
        replicas = [process for process in below if process.name().startswith("ray::")]
        return [child for one in replicas for child in one.children() if "EngineCore" in child.name()]

    def wait_until_idle(self, seconds: float = 2.0) -> None:
        until = time.monotonic() + seconds
        while (number := self.num_running()) and time.monotonic() < until:
            time.sleep(0.05)
        assert number == 0


@dataclass(frozen=True)
class BesideOthers:
    """Starts a real engine on cores that another one of this session has as well."""

    settings: EngineSettings
    # Where it notes the cores that it has.
    folder: str
    model: str | None = None
    served_names: tuple[str, ...] = ()

    def __call__(self) -> Engine:
        tempfile.tempdir = self.folder
        return EngineStart(self.model, self.served_names, self.settings, num_replicas=2, num_cores=None)()


def deploy(name: str, port: int, start: Callable[[], Any] | None = None, **settings: Any) -> Endpoint:
    """Run an application below the path of its name, on a Serve that listens on the port."""
    from ray import serve

    from pipelines.serve import build

    made = ServeSettings(port=port, root=f"/{name}", **settings)
    serve.run(build(made, start), name=name, route_prefix=made.root)
    return Endpoint(name, f"http://{HOST}:{port}/{name}")


def errors_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, reason and param of an error, whose form is looked at as well."""
    body = response.json()
    error = body["error"]
    assert body["status_code"] == error["code"] == response.status_code
    assert error["message"] and error["type"] and "Traceback" not in error["message"]
    assert ("detail" in body) == (response.status_code == 422)
    return response.status_code, error["reason"], error["param"]


def events_of(response: httpx.Response) -> list[str]:
    """The data of server-sent events; comments are none."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block]
    assert all("\n" not in block and block.startswith(("data: ", ":")) for block in blocks)
    return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
