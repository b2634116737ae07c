"""`overnight serve`: answer requests over HTTP, with the model and the contract of the batch door.

`serve run jobs.serve:app model=…` and a Serve configuration file (`jobs/serve.yaml`) deploy the same application on a
cluster; their arguments are the fields of `schemas.settings.ServeSettings`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

if __name__ == "__main__":
    # `python jobs/serve.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs import options
from jobs.config import CONTEXT, ConfigOption, make_app
from jobs.exits import ExitStatus
from jobs.interrupts import carry_out
from schemas.failures import UsageError

if TYPE_CHECKING:
    from schemas.settings import Key, ServeSettings

cli = make_app()


@cli.command(context_settings=CONTEXT)
def serve(
    context: typer.Context,
    model: options.Model = None,
    served_names: options.ServedNames = None,
    adapters: options.Adapters = None,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N|MIN-MAX|auto",
            help="Engines; MIN-MAX: by what there is to do. auto: all that there is room for.",
        ),
    ] = "auto",
    engine: options.Engine = None,
    host: Annotated[str, typer.Option(help="Address to listen on; another than loopback needs keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 8000,
    root: Annotated[str, typer.Option(help="Path that the routes begin with.")] = "/",
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file of API keys, of entries that --new-key prints.")
    ] = None,
    users: Annotated[
        str | None,
        typer.Option(metavar="FILE|URL", help="Database of users, which `overnight users` writes; see also --role."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE.FIELD=VALUE",
            help="What users of a role may, such as online.requests_per_minute=60. Repeatable.",
        ),
    ] = None,
    new_key: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Print a new key and its entry for --keys, and end.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Answer other machines without a key.")
    ] = False,
    bound: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="A bound of requests, such as max_output_tokens=4096. Repeatable."),
    ] = None,
    web_search: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="An async function that searches the web for legacy chats."),
    ] = None,
    drain: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Time for what is under way to end.")] = 60.0,
    verbose: options.Verbose = False,
    log_format: options.LogFormat = "text",
    config: ConfigOption = None,
) -> None:
    """Answer completion and chat requests over HTTP until Ctrl-C or SIGTERM, which let what is under way end.

    Exit status: 2 wrong usage, 1 failed, 130/143 interrupted, terminated.
    """

    def work() -> int:
        from schemas.settings import ONLINE, make_serve_settings, parse_bounds, parse_engine_settings, parse_roles

        options.choose_log_format(log_format)
        if new_key is not None:
            return print_key(new_key)
        settings = make_serve_settings(
            {
                "model": model,
                "served_names": tuple(served_names or ()),
                "adapters": options.parse_adapters(adapters or []),
                "engine": parse_engine_settings(engine or [], ONLINE),
                "replicas": _parse_replicas(replicas),
                "host": host,
                "port": port,
                "root": root,
                "keys": _find_keys(keys),
                "users": _find_users(context, users),
                "roles": parse_roles(role or []),
                "allow_unauthenticated": allow_unauthenticated,
                "bounds": parse_bounds(bound or []),
                "web_search": web_search,
                "drain_s": drain,
                "verbose": verbose,
            }
        )
        run(settings)

    raise typer.Exit(carry_out(work))


def run(settings: "ServeSettings") -> NoReturn:
    """Serve until a signal comes."""
    from pipelines.cluster import connected
    from pipelines.serve import prepare, serving

    prepare()
    with connected(settings.verbose), serving(settings) as url:
        _say_ready(settings, url)
        while True:
            signal.pause()


def app(arguments: dict[str, Any]) -> Any:
    """The application for `serve run jobs.serve:app` and Serve's configuration files."""
    from pipelines.serve import build
    from schemas.settings import make_serve_settings

    values = dict(arguments)
    keys = values.pop("keys", None)
    # Arguments of an application can be read in Serve's dashboard; a URL with a password is better left out of them.
    if users := os.environ.get("OVERNIGHT_USERS"):
        values.setdefault("users", users)
    # Where it listens is Serve's to say, and that nobody from elsewhere gets in without a key is the ingress's.
    return build(make_serve_settings({**values, "keys": _find_keys(Path(keys) if keys is not None else None)}))


def print_key(role: str) -> int:
    """A new key for somebody, and what the file of keys is to hold of it."""
    from pipelines.keys import digest, new_key
    from schemas.settings import Key

    key = new_key()
    try:
        entry = Key(role=role, digest=digest(key))
    except ValueError:
        raise UsageError(f"--new-key {role}: expected a name of letters, digits and .@_-, 64 at most") from None
    typer.echo(f"# The key, which is shown this once: {key}\n- role: {entry.role}\n  digest: {entry.digest}")
    typer.echo("  most_urgent_priority: 0")
    return ExitStatus.OK


def _say_ready(settings: "ServeSettings", url: str) -> None:
    key = ' -H "Authorization: Bearer $OVERNIGHT_API_KEY"' if settings.is_guarded else ""
    body = '{"prompt": "The capital of France is", "max_tokens": 8}'
    typer.echo(f"ready: {url}/v1/completions")
    typer.echo(f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'")


def _find_keys(path: Path | None) -> "tuple[Key, ...]":
    from pipelines.keys import own_key, read_keys

    keys = read_keys(path) if path is not None else ()
    # Not a flag: command lines can be seen by everybody on a machine.
    if key := os.environ.get("OVERNIGHT_API_KEY"):
        keys = (*keys, own_key(key))
    return keys


def _find_users(context: typer.Context, given: str | None) -> str | None:
    """What `--users` says, if it can be opened: found out before anything is started."""
    if (given := options.check_users(context, given)) is None:
        return None
    from pipelines.users import Users

    Users.open(given).close()
    return given


def _parse_replicas(text: str) -> Any:
    if text == "auto":
        return None
    fewest, dash, most = text.partition("-")
    if fewest.isdecimal() and (most.isdecimal() or not dash):
        return {"min_replicas": int(fewest), "max_replicas": int(most)} if dash else int(fewest)
    raise UsageError(f"--replicas {text}: expected a whole number from 1, a range such as 1-4, or auto")


if __name__ == "__main__":
    cli(prog_name="serve.py")
