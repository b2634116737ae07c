"""Submission: a verb as a job of a Ray cluster, by Ray's job client: sent, followed, stopped.

The job's own exit status is what counts: Ray's command knows but 0 and 1, and gives 0 for a job that was stopped.
"""

import asyncio
import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelines.machine import environment
from schemas.failures import JobLost, UsageError

log = logging.getLogger("overnight.submission")

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
# What doesn't go with the folder, beside what Ray leaves out by itself and what a .gitignore names.
EXCLUDES = ("out", ".env", ".env.*", ".netrc", ".aws", ".ssh", "*.pem", "*.key")
# Not a word of ours: what leaves no doubt which service is meant.
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_CONNECT_S = 10
# A cluster that doesn't answer for so long is lost, though its job may go on.
_LOST_S = 60.0
_LOOK_S = 0.5
# A log that breaks off so often is left as it is, once its job has ended.
_MOST_BROKEN = 3
# Folders and files that are named where there are too many of them.
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: Ray's word for it, and the status of its command, which one that was stopped hasn't."""

    state: str
    exit_status: int | None
    message: str


class Cluster:
    """The jobs of one cluster."""

    def __init__(self, address: str | None) -> None:
        """`address`: of the dashboard, `http://HOST:8265`, or of the head, `HOST:6379`; else RAY_API_SERVER_ADDRESS or
        RAY_ADDRESS names it, else it is on this machine. Raises UsageError where no cluster answers."""
        given = next((value for name in _ADDRESSES if (value := os.environ.get(name))), None)
        self.address = address or given or DEFAULT_ADDRESS
        _check_port(self.address)
        _quieten()
        # Ray's client puts the environment before what it is told.
        with environment({_ADDRESSES[0]: self.address}):
            self._client = self._connect()

    def _connect(self) -> Any:
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        try:
            try:
                return JobSubmissionClient(self.address)
            except AuthenticationError:
                # `ray start` turns authentication on where it finds a token, and Ray's client doesn't look for one.
                if not _use_token():
                    raise
                return JobSubmissionClient(self.address)
        except AuthenticationError as error:
            raise UsageError(
                f"--address {self.address}: the cluster wants its token ({_line(error)}). Give it in RAY_AUTH_TOKEN "
                "or ~/.ray/auth_token, with RAY_AUTH_MODE=token or without RAY_AUTH_MODE"
            ) from error
        except Exception as error:  # what answers there may be anything
            raise UsageError(
                f"--address {self.address}: no Ray dashboard answers there ({_line(error)}). Give that of the "
                "cluster's dashboard, http://HOST:8265"
            ) from error

    def submit(
        self,
        arguments: Sequence[str],
        working_dir: str | None = None,
        excludes: Sequence[str] = (),
        runtime_env: dict[str, Any] | None = None,
    ) -> str:
        """Start `overnight` with these arguments as a job, and return the job's id.

        `working_dir`: a folder that goes with it, without `excludes`, or a URI of a zip file; `runtime_env`: what else
        Ray is to prepare. Raises UsageError where the cluster doesn't take it.
        """
        env = dict(runtime_env or {})
        if working_dir is not None:
            if "://" not in working_dir and not Path(working_dir).is_dir():
                raise UsageError(f"--working-dir {working_dir}: no such folder. Give a folder, or leave it out")
            env["working_dir"] = working_dir
        if "working_dir" in env:
            env["excludes"] = [*EXCLUDES, *excludes, *env.get("excludes", ())]
        try:
            # The job's folder comes before what is installed there, so that this is the version that goes with it.
            job: str = self._client.submit_job(
                entrypoint=shlex.join(["python", "-m", "jobs.cli", *arguments]), runtime_env=env
            )
        except Exception as error:  # Ray raises a RuntimeError that holds a traceback, and others
            words = _line(error)
            if "working_dir" in env and "exceeds the maximum size" in words:
                words = f"the folder is too large; most of it are {_largest(Path(env['working_dir']))}. Leave out what "
                words = f"--working-dir {env['working_dir']}: {words}the job doesn't need with --exclude"
                raise UsageError(words) from error
            raise UsageError(f"--address {self.address}: the cluster doesn't take the job: {words}") from error
        return job

    def follow(self, job: str, show: Callable[[str], None]) -> Ended:
        """Show a job's log, from its beginning, until the job has ended.

        Raises UsageError where there is no such job, JobLost where the cluster doesn't answer any more.
        """
        self._look(job, is_known=False)
        return asyncio.run(self._follow(job, show))

    async def _follow(self, job: str, show: Callable[[str], None]) -> Ended:
        num_shown = num_broken = 0
        while True:
            num_seen, is_whole = 0, True
            try:
                async for text in self._client.tail_job_logs(job):
                    # After a broken connection it begins at the beginning again.
                    num_new = num_seen + len(text) - num_shown
                    if num_new > 0:
                        show(text[-num_new:])
                        num_shown += num_new
                    num_seen += len(text)
            except Exception:  # a connection that breaks says nothing about the job
                log.debug("the log is asked for again", exc_info=True)
                is_whole, num_broken = False, num_broken + 1
            info = await asyncio.to_thread(self._look, job)
            if info.status.is_terminal() and (is_whole or num_broken > _MOST_BROKEN):
                state = str(info.status.value)
                return Ended(state, _exit_status(info.driver_exit_code), _line(info.message or ""))
            await asyncio.sleep(_LOOK_S)

    def _look(self, job: str, is_known: bool = True) -> Any:
        """What the cluster says of a job; asks for a while."""
        until = time.monotonic() + _LOST_S
        while True:
            try:
                return self._client.get_job_info(job)
            except Exception as error:
                words = _line(error)
                is_gone = isinstance(error, RuntimeError) and "status code 404" in words
                if is_gone and not is_known:
                    raise UsageError(
                        f"{job}: the cluster knows no such job. `ray job list` tells those that it knows"
                    ) from error
                if is_gone or time.monotonic() > until:
                    raise JobLost(f"{job}: the cluster can't tell any more what becomes of it ({words})") from error
            time.sleep(_LOOK_S)

    def stop(self, job: str) -> None:
        """Have a job stopped: SIGTERM, and three seconds later SIGKILL. Raises JobLost where nobody takes that."""
        try:
            self._client.stop_job(job)
        except Exception as error:
            raise JobLost(f"{job}: it couldn't be stopped ({_line(error)}); it may go on") from error


def _exit_status(code: int | None) -> int | None:
    """As a shell says it: a process that died of a signal has 128 and the signal's number."""
    return code if code is None or code >= 0 else 128 - code


def _check_port(address: str) -> None:
    """Raises UsageError where nobody listens: Ray would try for minutes."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        host = port = None
    if not host or not port:
        raise UsageError(f"--address {address}: expected that of the cluster's dashboard, such as http://HOST:8265")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise UsageError(
            f"--address {address}: no Ray cluster answers there ({error.strerror or error}). Start one "
            "(`ray start --head`), or give the address of its dashboard, http://HOST:8265"
        ) from error


def _use_token() -> bool:
    """Have this process show Ray's token, if there is one and nothing else was said; whether it does."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    if os.environ.get("RAY_AUTH_MODE") is not None:
        return False
    return bool(maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def _quieten() -> None:
    """Ray's client tells of each step."""
    import ray.job_submission  # noqa: F401 - it sets its loggers' levels when it is imported

    for name in (
        "dashboard.modules.dashboard_sdk",
        "dashboard.modules.job.sdk",
        "_private.authentication.authentication_token_setup",
        "_private.runtime_env.packaging",
        "_private.runtime_env.working_dir",
    ):
        logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)


def _line(error: object) -> str:
    """What a person can read of an exception of Ray's: the last line of a traceback, the words of others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)
    return text if len(text) <= 300 else f"{text[:300]}…"


def _largest(folder: Path) -> str:
    """`data (810 MiB), weights.bin (300 MiB)`: what takes most of a folder."""
    sizes = {
        entry: sum(file.stat().st_size for file in [entry, *entry.rglob("*")] if file.is_file())
        for entry in folder.iterdir()
        if entry.name not in (".git", ".venv", "venv", *EXCLUDES)
    }
    largest = sorted(sizes, key=lambda entry: -sizes[entry])[:_NUM_NAMED]
    return ", ".join(f"{entry.name} ({sizes[entry] / 2**20:,.0f} MiB)" for entry in largest)
