"""The Ray cluster of a run: the one that is there, or one of our own that leaves nothing behind."""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from pipelines import logs, machine
from pipelines.ray_errors import as_ours
from schemas import tables
from schemas.failures import UsageError

# Processes that we started get this long to end by themselves.
_ENDING_S = 30
_CONNECT_S = 10
_WATCH_MS = 30_000
# What a task of a sort takes at a time; it needs thrice that.
_SHUFFLED_BYTES = 64 << 20


# Whether the cluster that this process is on was started for it.
_is_own = threading.Event()


def is_own() -> bool:
    """Whether this process is on a Ray cluster of its own: one machine, which no other joins."""
    return _is_own.is_set()


@contextlib.contextmanager
def connected(verbose: bool) -> Iterator[None]:
    """A Ray cluster: the one that is there (RAY_ADDRESS, or started on this machine), else one of our own.

    Of our own, no process is left when the block ends. What Ray raises in the block because an engine or a store fails
    is raised as EngineUnusable or StorageFailed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray warns of a coming change of a default that doesn't touch us: no task here runs without its GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A cluster of our own watches itself less often than Ray's would: on a small machine that is the engine's time.
    os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", str(_WATCH_MS))
    os.environ.setdefault("RAY_metrics_report_interval_ms", str(_WATCH_MS))
    # Its workers, and with them the engines, are no less urgent than what else a shared machine does.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if not verbose:
        # Ray's core writes its own warnings past its log files; the exceptions that it raises still arrive.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    else:
        logs.show()
    import ray
    import ray.data

    quiet = logging.INFO if verbose else logging.ERROR
    ours: list[psutil.Process] = []
    was_connected = ray.is_initialized()
    if not was_connected:
        before = set(psutil.Process().children(recursive=True))
        handler = signal.getsignal(signal.SIGTERM)
        with contextlib.nullcontext() if verbose else _stderr_unless_it_fails():
            _connect(log_to_driver=verbose, logging_level=quiet)
        if threading.current_thread() is threading.main_thread():
            # Ray has put one of its own in its place, which knows nothing of our exit statuses.
            signal.signal(signal.SIGTERM, handler)
        ours = [process for process in psutil.Process().children(recursive=True) if process not in before]
    context = ray.data.DataContext.get_current()
    # Ray's own blocks, of 128 MiB, are a gigabyte of Python objects while they are judged.
    context.target_max_block_size = tables.BLOCK_BYTES
    # By Ray's own measure, of a gibibyte, most sorts are begun by a single task.
    context.shuffle_input_batch_bytes, context.shuffle_compression = _SHUFFLED_BYTES, "lz4"
    # Replicas are added by what is left to do as soon as the cluster has room for them, although some are still on
    # their way; by Ray's own thresholds never, since a replica isn't given more than it works on at a time.
    scaling = context.autoscaling_config
    scaling.actor_pool_util_upscaling_threshold, scaling.actor_pool_util_downscaling_threshold = 0.5, 0.0
    context.enable_progress_bars = verbose
    context.print_on_execution_start = verbose
    # What it logs of a run that fails is a traceback, of what the run then says in a line.
    logging.getLogger("ray.data").setLevel(logging.INFO if verbose else logging.CRITICAL)
    try:
        with as_ours():
            yield
    finally:
        if not was_connected:
            ours += [child for process in ours for child in _children(process) if child not in ours]
            ray.shutdown()
            _is_own.clear()
            _wait_for(ours)


def _connect(**options: Any) -> None:
    """Join the Ray cluster that is there, else start one for this run, on the cores that we may use.

    Raises UsageError where RAY_ADDRESS names a cluster that doesn't answer.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        # Ray itself would go on trying for many minutes.
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise UsageError(f"RAY_ADDRESS={address}: no Ray cluster answers there. Start it, or unset it") from error
    # Not `address="auto"`, which also joins the private cluster of any other run on this machine.
    try:
        ray.init(include_dashboard=False, num_cpus=machine.count_cores(), **options)
        _is_own.set()
    except ValueError:
        # What Ray says when there is a cluster to join, whose resources aren't ours to set.
        ray.init(**options)


@contextlib.contextmanager
def _stderr_unless_it_fails() -> Iterator[None]:
    """Keep back what anything, C++ included, writes to standard error in the block; show it when the block raises."""
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(real, kept.read())
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_for(processes: list[psutil.Process]) -> None:
    """Until these have ended; those that don't are ended."""
    _, alive = psutil.wait_procs(processes, timeout=_ENDING_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5)
