"""`overnight users`: who may use the endpoint, in the database that `overnight serve --users` reads."""

import getpass
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":
    # `python jobs/users.py` puts jobs/ first on the path, where its modules would shadow others.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer

from jobs import options
from jobs.config import CONTEXT, make_app
from jobs.exits import ExitStatus
from jobs.interrupts import carry_out
from schemas.failures import UsageError

if TYPE_CHECKING:
    from pipelines.users import User, UserKey, Users

app = make_app()


class RoleOption(StrEnum):
    """The roles of `schemas.settings.RoleName`, as the command line takes them."""

    ONLINE = "online"
    BATCH = "batch"
    OPERATOR = "operator"


Database = Annotated[
    str,
    typer.Option(
        "--users",
        envvar="OVERNIGHT_USERS",
        metavar="FILE|URL",
        help="SQLite file, or SQLAlchemy's URL of another database.",
    ),
]
Name = Annotated[str, typer.Argument(help="Whom.", show_default=False)]


@app.callback()
def _users() -> None:
    """Add, change and list the users of the endpoint, and their keys."""


@app.command(context_settings=CONTEXT)
def add(
    context: typer.Context,
    name: Name,
    users: Database,
    role: Annotated[RoleOption, typer.Option(help="What he may.")] = RoleOption.ONLINE,
    no_password: Annotated[bool, typer.Option("--no-password", help="He is to have keys alone.")] = False,
) -> None:
    """Add a user; his password is asked for, or read from standard input. Makes the file where there is none."""

    def work() -> int:
        with _opened(context, users, create=True) as database:
            from pipelines.passwords import hash_password

            database.add(name, role.value, None if no_password else hash_password(_read_password(name)))
        return ExitStatus.OK

    raise typer.Exit(carry_out(work))


@app.command(context_settings=CONTEXT)
def password(context: typer.Context, name: Name, users: Database) -> None:
    """Give a user a new password, which is asked for, or read from standard input; his tokens are good no more."""

    def work() -> int:
        with _opened(context, users) as database:
            from pipelines.passwords import hash_password

            database.change(name, password=hash_password(_read_password(name)))
        return ExitStatus.OK

    raise typer.Exit(carry_out(work))


@app.command(context_settings=CONTEXT)
def disable(context: typer.Context, name: Name, users: Database) -> None:
    """Refuse a user, his keys and, for good, his tokens."""
    _do(context, users, lambda database: database.change(name, is_enabled=False))


@app.command(context_settings=CONTEXT)
def enable(context: typer.Context, name: Name, users: Database) -> None:
    """Take a disabled user in again, and his keys."""
    _do(context, users, lambda database: database.change(name, is_enabled=True))


@app.command(context_settings=CONTEXT)
def role(
    context: typer.Context,
    name: Name,
    role: Annotated[RoleOption, typer.Argument(help="What he may from now on.")],
    users: Database,
) -> None:
    """Give a user another role."""
    _do(context, users, lambda database: database.change(name, role=role.value))


@app.command(context_settings=CONTEXT)
def remove(context: typer.Context, name: Name, users: Database) -> None:
    """Take a user out, and his keys."""
    _do(context, users, lambda database: database.remove(name))


@app.command("list", context_settings=CONTEXT)
def list_users(
    context: typer.Context,
    users: Database,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each user.")] = False,
) -> None:
    """List users and the ids of their keys; nothing secret."""

    def show(database: "Users") -> None:
        for user, keys in database.all():
            told = _describe(user, keys)
            typer.echo(json.dumps(told) if as_json else _to_line(told))
            for key in () if as_json else told["keys"]:
                typer.echo(
                    f"  key {key['id']}, made {_day(key['created'])}{', ' + key['label'] if key['label'] else ''}"
                )

    _do(context, users, show)


@app.command("add-key", context_settings=CONTEXT)
def add_key(
    context: typer.Context,
    name: Name,
    users: Database,
    label: Annotated[str, typer.Option(help="What it is for; shown by `list`.")] = "",
) -> None:
    """Print a new key of a user's, this once."""
    _do(context, users, lambda database: typer.echo(database.add_key(name, label)))


@app.command("drop-key", context_settings=CONTEXT)
def drop_key(
    context: typer.Context,
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `list` shows it.", show_default=False)],
    users: Database,
) -> None:
    """Refuse a key from now on."""
    _do(context, users, lambda database: database.drop_key(id))


def _do(context: typer.Context, given: str, what: "Callable[[Users], Any]") -> None:
    def work() -> int:
        with _opened(context, given) as database:
            what(database)
        return ExitStatus.OK

    raise typer.Exit(carry_out(work))


@contextmanager
def _opened(context: typer.Context, given: str, *, create: bool = False) -> "Iterator[Users]":
    from pipelines.users import Users

    options.check_users(context, given)
    database = Users.open(given, create=create)
    try:
        yield database
    finally:
        database.close()


def _read_password(name: str) -> str:
    """From the terminal, unseen, or else the first line of standard input. Never an argument."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline().rstrip("\r\n")
        if not line:
            raise UsageError("found no password on standard input, expected one line")
        return line
    given = getpass.getpass(f"Password for {name}: ")
    if getpass.getpass("Again: ") != given:
        raise UsageError("the two passwords differ")
    return given


def _describe(user: "User", keys: "list[UserKey]") -> dict[str, Any]:
    return {
        "name": user.name,
        "role": user.role,
        "is_enabled": user.is_enabled,
        "has_password": user.password is not None,
        "created": user.created,
        "keys": [{"id": key.id, "label": key.label, "created": key.created} for key in keys],
    }


def _to_line(told: dict[str, Any]) -> str:
    more = ("" if told["is_enabled"] else ", disabled") + ("" if told["has_password"] else ", no password")
    return f"{told['name']}: {told['role']}{more}"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


if __name__ == "__main__":
    app(prog_name="users.py")
