"""The file of `overnight nightly`: datasets whose fields are the options of `overnight score`, read by its parser."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jobs import score
from jobs.config import as_arguments, read_yaml
from schemas.failures import UsageError

if TYPE_CHECKING:
    from schemas.nightly import Dataset, Nightly

_OWN = ("name", "priority", "catch_up", "keep", "missing")
# What a night is, or would undo.
_NOT_HERE = ("changed", "restart", "retry_errors", "dry_run", "config")
# What is said to a whole night, by its own command.
_COMMANDS = ("config", "dry_run", "log_format")


def read_nightly(path: Path) -> "Nightly":
    """What a file says. Raises UsageError that names the file, the dataset, the field."""
    from schemas.nightly import Nightly

    values = {str(name).replace("-", "_"): value for name, value in read_yaml(path).items()}
    defaults = _mapping(values.pop("defaults", {}), f"{path}: defaults")
    entries = values.get("datasets")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path}: datasets: found {_short(entries)}, expected a list with one dataset at least")
    values["datasets"] = tuple(
        _dataset(_mapping(entry, f"{path}: datasets[{place}]"), defaults, f"{path}: datasets[{place}]")
        for place, entry in enumerate(entries)
    )
    nightly: Nightly = _made(Nightly, values, str(path))
    return nightly


def _dataset(entry: dict[str, Any], defaults: dict[str, Any], where: str) -> "Dataset":
    from schemas.nightly import Dataset

    where += f" ({entry['name']})" if "name" in entry else ""
    values = defaults | entry
    if found := next((name for name in _NOT_HERE if name in values), None):
        raise UsageError(f"{where}: {found}: has no place here: each night is a new run that keeps what is unchanged")
    if "log_format" in values:
        raise UsageError(f"{where}: log_format: is a matter of the whole night: overnight nightly --log-format json")
    own = {name: values.pop(name) for name in _OWN if name in values}
    command = typer.main.get_command(score.app)
    for parameter in command.params:
        # A dataset is what its file says; what the environment says would be said of all of them.
        parameter.envvar = None
    try:
        context = command.make_context("score", as_arguments(command, values), auto_envvar_prefix=None)
        given = {name: value for name, value in context.params.items() if name not in _COMMANDS}
        beside = {"allow_errors": given.pop("allow_errors"), "has_report": not given.pop("no_report")}
        settings = score.make_settings(**given)
    except typer.BadParameter as error:
        raise UsageError(f"{where}: {error.format_message().rstrip('.')}") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    dataset: Dataset = _made(Dataset, {**own, **beside, "run": settings}, where)
    return dataset


def _made(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    from pydantic import ValidationError

    try:
        return kind(**values)
    except ValidationError as error:
        # A misspelt field explains another one that is missing.
        first = next((one for one in error.errors() if one["type"] == "extra_forbidden"), error.errors()[0])
        field = ".".join(map(str, first["loc"]))
        words = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            names = [name for name in kind.model_fields if name not in ("run", "has_report")]
            words = f"no such field. There are: {', '.join(names)}"
        elif first["type"] == "missing":
            words = "found nothing. Give it"
        elif field:
            words = f"found {_short(first['input'])}, {words[0].lower()}{words[1:]}"
        raise UsageError(f"{where}: {field + ': ' if field else ''}{words}") from None


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: found {_short(value)}, expected `field: value` lines")
    return {str(name).replace("-", "_"): one for name, one in value.items()}


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
