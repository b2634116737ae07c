"""Options that several verbs share, and what their values mean."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schemas.failures import UsageError

if TYPE_CHECKING:
    from schemas.requests import Endpoint

Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        envvar="OVERNIGHT_INPUT",
        help="JSONL file, folder, glob or s3:// URI; plain, gzip or zstd. Repeatable.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model folder, s3:// folder, or hub name (owner/name@revision). Default: the embedded 135M model."
    ),
]
ServedNames = Annotated[
    list[str] | None,
    typer.Option(
        "--served-name", envvar="OVERNIGHT_SERVED_NAME", help="Name under which requests ask for the model. Repeatable."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        envvar="OVERNIGHT_ADAPTER",
        metavar="NAME=FOLDER",
        help="A LoRA adapter, and the name that requests ask for it by. Repeatable.",
    ),
]
Engine = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD=VALUE", help="An engine setting, such as dtype=float32. Repeatable."),
]
Fill = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        envvar="OVERNIGHT_SET",
        metavar="FIELD=VALUE",
        help="A field for every request that doesn't have it, such as max_tokens=256.",
    ),
]
EndpointKind = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="KIND", help="What bare bodies are: completions, chat or legacy. Default: as they look."
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse fields that the schema doesn't know.")]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Take the first N lines alone.")]
Sample = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Take N lines by chance, the same ones each time.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Let vLLM and Ray log.")]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="text|json",
        help="json: log objects, a line each, with the ids of run and row; never a prompt.",
    ),
]

NoDedup = Annotated[
    bool,
    typer.Option("--no-dedup", help="Compute equal requests (greedy, seeded or beams) each, not once for all of them."),
]
Price = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=VALUE",
        help="A price: prompt, completion, cached (each a million tokens) or replica_hour. Repeatable.",
    ),
]

_ENDPOINTS: "Mapping[str, Endpoint]" = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "legacy": "/external/api/inference",
}


def input_settings(
    *,
    inputs: list[str],
    model: str | None,
    served_names: list[str] | None,
    adapters: list[str] | None,
    engine: list[str] | None,
    fill: list[str] | None,
    endpoint: str | None,
    strict: bool,
    limit: int | None,
    sample: int | None,
    verbose: bool,
) -> dict[str, Any]:
    """The fields of `InputSettings`, from what was given. Raises UsageError that names the flag."""
    from schemas.settings import parse_engine_settings

    for flag, is_empty in (("--input", "" in inputs), ("--model", model == "")):
        if is_empty:
            raise UsageError(f"{flag}: found nothing, expected a path or URI. Is a variable unset?")
    if limit is not None and sample is not None:
        raise UsageError("--limit and --sample: found both; a run takes the first lines or some by chance. Give one")
    return {
        "inputs": tuple(inputs),
        "model": model,
        "served_names": tuple(served_names or ()),
        "adapters": parse_adapters(adapters or []),
        "engine": parse_engine_settings(engine or []),
        "fill": parse_fill(fill or []),
        "endpoint": _parse_endpoint(endpoint),
        "strict": strict,
        "limit": limit,
        "sample": sample,
        "verbose": verbose,
    }


def choose_log_format(given: str) -> None:
    """Raises UsageError."""
    from pipelines import logs

    if given not in {"text", "json"}:
        raise UsageError(f"--log-format {given}: expected text or json")
    if given == "json":
        logs.structure()


def parse_adapters(pairs: list[str]) -> dict[str, str]:
    """Folders of adapters by name, of `NAME=FOLDER` pairs. Raises UsageError."""
    adapters: dict[str, str] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder:
            raise UsageError(f"--adapter {pair}: expected NAME=FOLDER, such as --adapter formal=./formal-lora")
        if name in adapters:
            raise UsageError(f"--adapter {name}: found twice. Give each adapter a name of its own")
        adapters[name] = folder
    return adapters


def parse_fill(pairs: list[str]) -> dict[str, Any]:
    """Fields and values of `FIELD=VALUE` pairs; a value that is no JSON is a text. Raises UsageError."""
    from schemas.contract import SCHEMA_FILES, known_fields

    known = frozenset().union(*map(known_fields, SCHEMA_FILES))
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair}: expected FIELD=VALUE, such as --set max_tokens=256")
        if name not in known:
            raise UsageError(f"--set {name}: no request has this field; see schemas/*.schema.json for their names")
        try:
            fields[name] = json.loads(text)
        except ValueError:
            fields[name] = text
    return fields


def _parse_endpoint(kind: str | None) -> "Endpoint | None":
    if kind is None:
        return None
    try:
        return _ENDPOINTS[kind]
    except KeyError:
        raise UsageError(f"--endpoint {kind}: expected {' or '.join(_ENDPOINTS)}") from None


def check_users(context: typer.Context, given: str | None) -> str | None:
    """What `--users` says. Raises UsageError for a password where everybody on the machine can see it."""
    from pipelines.users import has_password

    source = context.get_parameter_source("users")
    if given and source is not None and source.name == "COMMANDLINE" and has_password(given):
        raise UsageError(
            "--users: found a URL with a password, and command lines can be seen by everybody on this machine. "
            "Give it as OVERNIGHT_USERS in the environment"
        )
    return given


def say(message: str, status: int) -> int:
    """One line on standard error; the status, to end with."""
    typer.echo(f"overnight: {message}", err=True)
    return status
