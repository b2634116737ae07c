"""One source for every option: the flag, else the environment (`OVERNIGHT_MODEL`), else the YAML file of `--config`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from schemas.failures import UsageError


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command's options."""
    if path is None:
        return None
    try:
        values = read_yaml(path)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    names = option_names(context.command)
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        parameter = names.get(str(key).replace("-", "_"))
        if parameter is None or parameter.name == "config":
            raise typer.BadParameter(f"{path}: no option is named {key!r}. There are: {listed(names)}")
        assert parameter.name is not None, "an option has a name"
        defaults[parameter.name] = _as_option(value)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def read_yaml(path: Path, flag: str = "", example: str = "option: value") -> dict[str, Any]:
    """A YAML file's mapping. Raises UsageError, whose words begin with `flag`, and hold an `example` of a line."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{flag}{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{flag}{path}: expected `{example}` lines, found {type(values).__name__}")
    return values


def option_names(command: Any) -> dict[str, Any]:
    """A command's parameters by the names that they have in a YAML file."""
    return {
        option.lstrip("-").replace("-", "_"): parameter for parameter in command.params for option in parameter.opts
    }


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names) - {"config", "help"}))


def as_arguments(command: Any, values: Mapping[str, Any]) -> list[str]:
    """Options in a YAML file as a command line gives them. Raises UsageError for one that the command hasn't, or can't
    take so."""
    names, arguments = option_names(command), []
    for key, value in values.items():
        parameter = names.get(str(key).replace("-", "_"))
        if parameter is None:
            raise UsageError(f"{key}: no such option. There are: {listed(names)}")
        flag = max(parameter.opts, key=len)
        given = _as_option(value)
        if parameter.is_flag:
            if not isinstance(given, bool):
                raise UsageError(f"{key}: found {value!r}, expected true or false")
            arguments += [flag] if given else []
        elif given is None or (isinstance(given, list) and not parameter.multiple):
            raise UsageError(f"{key}: found {'nothing' if given is None else repr(value)}, expected one value")
        else:
            for one in given if isinstance(given, list) else [given]:
                arguments.append(f"{flag}={one}")
    return arguments


def _as_option(value: Any) -> Any:
    """A YAML value as a command line would give it: a mapping as FIELD=VALUE pairs."""
    if isinstance(value, dict):
        return [f"{name}={_as_text(setting)}" for name, setting in value.items()]
    return value


def _as_text(setting: Any) -> str:
    return setting if isinstance(setting, str) else json.dumps(setting, ensure_ascii=False, default=str)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_load,
        exists=True,
        dir_okay=False,
        help="YAML file with the same names as the flags; flags and OVERNIGHT_… variables go before it.",
    ),
]


# Every option can also be set in the environment, as OVERNIGHT_<OPTION>.
CONTEXT = {"auto_envvar_prefix": "OVERNIGHT", "help_option_names": ["-h", "--help"]}


def make_app() -> typer.Typer:
    """An empty command line, without the tracebacks and extras that a user has no use for."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False)
