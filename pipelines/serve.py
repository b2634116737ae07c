"""Serve: the online door, a Ray Serve application of two deployments: an ingress (`pipelines/ingress.py`) and the
engine (`pipelines/served_engine.py`), over the checks and the engine of the batch door."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import SecretStr

from pipelines import traces
from pipelines.adapters import resolve_adapters
from pipelines.engine import Engine
from pipelines.ingress import Ingress
from pipelines.limits import read_limits
from pipelines.logs import is_structured
from pipelines.model import resolve
from pipelines.placement import Placement, place, start_of
from pipelines.router import AffinityRouter
from pipelines.served_engine import DEPLOYMENT, INGRESS, ServedEngine
from pipelines.users import Users, locate
from pipelines.web_search import load_search
from schemas.failures import EngineUnusable, UsageError
from schemas.settings import Autoscaling, ServeSettings

APP = "overnight"
# Serve's own name of what runs it.
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
# Serve asks each replica so often, and replaces one that fails three times.
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 90.0
# Bodies that an ingress may hold beside those of requests that engines have or that wait for one.
_SPARE_IN_FLIGHT = 64


def prepare() -> None:
    """What Serve is to know of this machine; to be called before Ray starts."""
    # Serve gives its proxy five seconds to start; beside an engine that loads, a small machine needs more.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")


def build(settings: ServeSettings, start: Callable[[], Engine] | None = None) -> Any:
    """The application, ready for `serve.run`. On a cluster that is there: it is asked what it has room for.

    `start`: starts a replica's engine; by default the real one. Raises UsageError.
    """
    from ray import serve
    from ray.serve.config import BackpressureConfig, RequestRouterConfig

    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and not (
        settings.is_guarded or settings.allow_unauthenticated
    ):
        raise UsageError(
            "RAY_SERVE_ENABLE_HA_PROXY=1 opens the port to other machines and hides where clients come from. Give "
            "users (--users) or keys (--keys FILE), or say --allow-unauthenticated"
        )
    model = resolve(settings.model)
    adapters = resolve_adapters(settings.adapters, model)
    # What can't be served is found out here and not by a replica.
    read_limits(model, settings.served_names, settings.engine, adapters)
    load_search(settings.web_search)
    placed = place(settings, model)
    start = start or start_of(settings, model, adapters, placed)
    # Replicas have a current folder of their own.
    found: dict[str, Any] = {
        "model": model.spec,
        "adapters": {name: adapter.spec for name, adapter in adapters.items()},
        "users": _find_users(settings),
    }
    bounds = settings.bounds
    # Half of them may be a run's, and fill the engine with others waiting before it.
    max_ongoing = bounds.max_ongoing_requests or 2 * placed.rows_in_flight
    most_replicas = placed.num_replicas
    if isinstance(settings.replicas, Autoscaling):
        most_replicas = settings.replicas.max_replicas
    engine = serve.deployment(ServedEngine, name=DEPLOYMENT).options(
        **_scale(settings, placed, max_ongoing),
        max_ongoing_requests=max_ongoing,
        max_queued_requests=bounds.max_queued_requests,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=bounds.retry_after_s),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_s,
        request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
        ray_actor_options={
            "num_cpus": placed.num_cpus,
            "num_gpus": placed.num_gpus,
            "runtime_env": {"env_vars": placed.environment},
        },
    )
    sent = traces.environment()
    max_in_flight = max_ongoing * most_replicas + bounds.max_queued_requests + _SPARE_IN_FLIGHT
    ingress = serve.deployment(Ingress, name=INGRESS).options(
        num_replicas=settings.ingress_replicas,
        # It turns away by itself what is too much, in words of the contract.
        max_ongoing_requests=2 * max_in_flight,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": 0, **({"runtime_env": {"env_vars": sent}} if sent else {})},
    )
    return ingress.bind(
        settings.model_copy(update=found),
        engine.bind(start, max(1, max_ongoing // 2), bounds.most_urgency),
        max_ongoing,
        max_in_flight,
    )


def _find_users(settings: ServeSettings) -> SecretStr | None:
    """Where the database is, whatever the current folder. Raises UsageError where it can't be read."""
    if settings.users is None:
        return None
    given = settings.users.get_secret_value()
    Users.open(given).close()
    return SecretStr(locate(given))


def _scale(settings: ServeSettings, placed: Placement, max_ongoing: int) -> dict[str, Any]:
    """The number of replicas, as Serve takes it."""
    wanted = settings.replicas
    if not isinstance(wanted, Autoscaling):
        return {"num_replicas": placed.num_replicas}
    return {
        "num_replicas": "auto",
        "autoscaling_config": {
            "min_replicas": wanted.min_replicas,
            "max_replicas": wanted.max_replicas,
            "target_ongoing_requests": wanted.target_ongoing_requests or max(1.0, max_ongoing / 3),
        },
    }


@contextmanager
def serving(settings: ServeSettings) -> Iterator[str]:
    """The endpoint, up and answering, at the URL that it yields; drained and gone when the block ends.

    On a Ray that is connected, without a Serve. Raises UsageError, and EngineUnusable when no engine starts.
    """
    from ray import serve

    _check_address(settings)
    if not settings.verbose:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": settings.host, "port": settings.port},
        logging_config={
            "log_level": "INFO" if settings.verbose else "ERROR",
            "enable_access_log": settings.verbose,
            "encoding": "JSON" if is_structured() else "TEXT",
        },
    )
    try:
        try:
            serve.run(build(settings), name=APP, route_prefix=settings.root)
        except RuntimeError as error:
            raise EngineUnusable(_why_not_up() or " ".join(str(error).split())) from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield f"http://{host}:{settings.port}{settings.root.rstrip('/')}"
    finally:
        serve.delete(APP)
        serve.shutdown()


def _check_address(settings: ServeSettings) -> None:
    """Raises UsageError where the endpoint can't have its address."""
    import ray

    try:
        ray.get_actor(_CONTROLLER, namespace="serve")
    except ValueError:
        pass
    else:
        raise UsageError(
            "Ray Serve runs on this cluster already, and where it listens is settled. Deploy beside it, with "
            "`serve run jobs.serve:app --name overnight --route-prefix /overnight`, or stop it (`serve shutdown`)"
        )
    if "RAY_ADDRESS" in os.environ:
        return
    try:
        socket.create_server(
            (settings.host, settings.port), family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        ).close()
    except OSError as error:
        raise UsageError(
            f"--host {settings.host} --port {settings.port}: nobody can listen there ({error.strerror}). "
            "Give another --port"
        ) from error


def _why_not_up() -> str:
    """What a replica said that didn't start, on one line."""
    from ray import serve

    app = serve.status().applications.get(APP)
    messages = [deployment.message for deployment in app.deployments.values()] if app is not None else []
    told = [line for message in messages for line in message.splitlines() if "EngineUnusable" in line]
    return told[-1].rpartition("EngineUnusable: ")[2] if told else ""
