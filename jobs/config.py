"""One source for every option: the flag, else the environment (`OVERNIGHT_MODEL`), else the YAML file of `--config`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command's options."""
    if path is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path}: expected `option: value` lines, found {type(values).__name__}")
    names = {
        option.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for option in parameter.opts
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        parameter = names.get(str(key).replace("-", "_"))
        if parameter is None or parameter.name == "config":
            known = ", ".join(sorted(set(names) - {"config", "help"}))
            raise typer.BadParameter(f"{path}: no option is named {key!r}. There are: {known}")
        assert parameter.name is not None, "an option has a name"
        defaults[parameter.name] = _as_option(value)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _as_option(value: Any) -> Any:
    """A YAML value as a command line would give it: a mapping as FIELD=VALUE pairs."""
    if isinstance(value, dict):
        return [f"{name}={setting}" for name, setting in value.items()]
    return value


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
