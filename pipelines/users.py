"""Users and their keys, in a database: SQLite in a file, or any other that SQLAlchemy has a driver for.

The command `overnight users` writes it; the endpoint reads it alone, so that it does with a role that may only read.
"""

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from pipelines.bearers import MIN_SECRET_BYTES
from pipelines.keys import PREFIX, digest
from schemas.failures import StorageFailed, UsageError
from schemas.settings import RoleName

# A name is shown in logs and metrics.
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
LABEL = re.compile(r"[\w .,:/@-]{0,100}")
# A key tells by which id it is looked up; what follows is the secret.
_KEY = re.compile(rf"{PREFIX}([0-9a-f]{{16}})-[\w-]{{43}}", re.ASCII)
# Wait so long for somebody else's writing to end.
_LOCKED_S = 5

_METADATA = sa.MetaData()
_USERS = sa.Table(
    "overnight_users",
    _METADATA,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("role", sa.String(16), nullable=False),
    # None: he has keys alone.
    sa.Column("password", sa.String(255)),
    sa.Column("is_enabled", sa.Boolean, nullable=False),
    # Counts what makes the tokens given out so far worthless: a new password, and being disabled.
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)
_KEYS = sa.Table(
    "overnight_keys",
    _METADATA,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("user_name", sa.ForeignKey("overnight_users.name"), nullable=False, index=True),
    sa.Column("digest", sa.String(97), nullable=False),
    sa.Column("label", sa.String(100), nullable=False),
    sa.Column("created", sa.Float, nullable=False),
)
_SECRETS = sa.Table(
    "overnight_secrets",
    _METADATA,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.String(128), nullable=False),
)
_TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class User:
    """One user, without his keys; `password` is a hash."""

    name: str
    role: RoleName
    password: str | None
    is_enabled: bool
    generation: int
    created: float


@dataclass(frozen=True, slots=True)
class UserKey:
    """A key without its secret: a digest of it."""

    id: str
    user_name: str
    digest: str
    label: str
    created: float


class UsersUnavailable(StorageFailed):
    """The database doesn't answer."""


def locate(given: str) -> str:
    """The URL of what `--users` says, a path or a URL; of files the same from every folder. Raises UsageError."""
    if not given:
        raise UsageError("--users: found nothing, expected a file or a database URL. Is a variable unset?")
    if "://" not in given:
        return _to_text(URL.create("sqlite", database=str(Path(given).absolute())))
    try:
        url = sa.make_url(given)
    except (ArgumentError, ValueError):
        # Not what SQLAlchemy says, which shows the URL and the password in it.
        raise UsageError("--users: this URL can't be read; expected one such as postgresql://user@host/name") from None
    if url.get_backend_name() == "sqlite" and url.database and not url.database.startswith("file:"):
        url = url.set(database=str(Path(url.database).absolute()))
    return _to_text(url)


def has_password(given: str) -> bool:
    """Whether a URL holds one."""
    try:
        return "://" in given and sa.make_url(given).password is not None
    except (ArgumentError, ValueError):
        return False


def key_id(key: str) -> str | None:
    """By what a key is looked up; None for one that isn't of this kind."""
    found = _KEY.fullmatch(key)
    return found[1] if found is not None else None


class Users:
    """The database. Its methods wait for it: not for an event loop. They raise UsersUnavailable."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, given: str, *, create: bool = False) -> "Users":
        """Of a path or URL. `create`: where there is none, one is made. Raises UsageError."""
        url = sa.make_url(locate(given))
        shown = url.render_as_string(hide_password=True)
        arguments: dict[str, Any] = {}
        if url.get_backend_name() == "sqlite":
            arguments = {"timeout": _LOCKED_S}
            _find_file(Path(url.database or ""), create)
        try:
            # Parameters are passwords' hashes and keys' digests: not for the text of an error.
            engine = sa.create_engine(url, hide_parameters=True, pool_pre_ping=True, connect_args=arguments)
        except (NoSuchModuleError, ImportError) as error:
            raise UsageError(f"--users {shown}: its driver isn't installed ({' '.join(str(error).split())})") from None
        users = cls(engine)
        try:
            if create:
                users._prepare()
            elif not sa.inspect(engine).has_table(_SECRETS.name):
                raise UsageError(f"--users {shown}: holds no users. Make one: overnight users add NAME --users …")
        except (SQLAlchemyError, UsersUnavailable) as error:
            raise UsageError(f"--users {shown}: it can't be opened ({_words(error)})") from None
        return users

    def close(self) -> None:
        self._engine.dispose()

    def _prepare(self) -> None:
        """The tables and the secret, where they aren't there; another process may do the same."""
        _METADATA.create_all(self._engine)
        try:
            with self._writing() as connection:
                if connection.execute(sa.select(_SECRETS.c.name).where(_SECRETS.c.name == _TOKENS)).first() is None:
                    made = secrets.token_hex(MIN_SECRET_BYTES)
                    connection.execute(_SECRETS.insert().values(name=_TOKENS, value=made))
        except IntegrityError:
            pass

    # --- what the endpoint reads ----------------------------------------------------------------------------------

    def secret(self) -> bytes:
        """What tokens are signed by."""
        with self._reading() as connection:
            found = connection.execute(sa.select(_SECRETS.c.value).where(_SECRETS.c.name == _TOKENS)).scalar()
        if found is None:
            raise UsersUnavailable("its secret is gone")
        return bytes.fromhex(found)

    def find(self, name: str) -> User | None:
        with self._reading() as connection:
            row = connection.execute(sa.select(_USERS).where(_USERS.c.name == name)).first()
        return User(**row._mapping) if row is not None else None

    def find_key(self, id: str) -> tuple[UserKey, User] | None:
        """A key and whose it is, by its id."""
        with self._reading() as connection:
            key = connection.execute(sa.select(_KEYS).where(_KEYS.c.id == id)).first()
            if key is None:
                return None
            row = connection.execute(sa.select(_USERS).where(_USERS.c.name == key.user_name)).first()
        return (UserKey(**key._mapping), User(**row._mapping)) if row is not None else None

    def all(self) -> list[tuple[User, list[UserKey]]]:
        """Every user with his keys, by name."""
        with self._reading() as connection:
            users = [User(**row._mapping) for row in connection.execute(sa.select(_USERS).order_by(_USERS.c.name))]
            keys = [UserKey(**row._mapping) for row in connection.execute(sa.select(_KEYS).order_by(_KEYS.c.created))]
        return [(user, [key for key in keys if key.user_name == user.name]) for user in users]

    # --- what the command writes; all raise UsageError ------------------------------------------------------------

    def add(self, name: str, role: RoleName, password: str | None) -> None:
        """`password`: its hash; None for a user who has keys alone."""
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r}: expected a name of letters, digits and .@_-, 64 at most")
        values = {"name": name, "role": role, "password": password}
        # Not from 0: tokens of a user of this name who was removed are none of this one's.
        more = {"is_enabled": True, "generation": secrets.randbits(30), "created": time.time()}
        try:
            with self._writing() as connection:
                connection.execute(_USERS.insert().values(**values, **more))
        except IntegrityError:
            raise UsageError(f"{name}: there is a user of this name") from None

    def change(self, name: str, **values: Any) -> None:
        """Columns of a user. A new password, or being disabled, makes his tokens worthless for good."""
        if "password" in values or values.get("is_enabled") is False:
            values["generation"] = _USERS.c.generation + 1
        with self._writing() as connection:
            if not connection.execute(_USERS.update().where(_USERS.c.name == name).values(**values)).rowcount:
                raise _no_such_user(name)

    def remove(self, name: str) -> None:
        """A user and his keys."""
        with self._writing() as connection:
            connection.execute(_KEYS.delete().where(_KEYS.c.user_name == name))
            if not connection.execute(_USERS.delete().where(_USERS.c.name == name)).rowcount:
                raise _no_such_user(name)

    def add_key(self, name: str, label: str = "") -> str:
        """A new key of a user's, which nobody can ask for again."""
        if not LABEL.fullmatch(label):
            raise UsageError(f"{label!r}: expected a label of letters, digits, spaces and .,:/@_-, 100 at most")
        id = secrets.token_hex(8)
        key = f"{PREFIX}{id}-{secrets.token_urlsafe(32)}"
        values = {"id": id, "user_name": name, "digest": digest(key), "label": label, "created": time.time()}
        with self._writing() as connection:
            if connection.execute(sa.select(_USERS.c.name).where(_USERS.c.name == name)).first() is None:
                raise _no_such_user(name)
            connection.execute(_KEYS.insert().values(**values))
        return key

    def drop_key(self, id: str) -> None:
        with self._writing() as connection:
            if not connection.execute(_KEYS.delete().where(_KEYS.c.id == id)).rowcount:
                raise UsageError(f"{id}: there is no key of this id; `overnight users list` shows them")

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise UsersUnavailable(_words(error)) from error

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise UsersUnavailable(_words(error)) from error


def _find_file(path: Path, create: bool) -> None:
    """A file that nobody else on the machine reads."""
    if path.is_file():
        return
    if not create:
        raise UsageError(f"--users {path}: there is no such file. Make it: overnight users add NAME --users {path}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise UsageError(f"--users {path}: it can't be made ({error.strerror})") from None


def _no_such_user(name: str) -> UsageError:
    return UsageError(f"{name}: there is no user of this name")


def _words(error: Exception) -> str:
    """What the database says, on one line and without the statement."""
    return " ".join(str(getattr(error, "orig", None) or error).split())[:300]


def _to_text(url: URL) -> str:
    return url.render_as_string(hide_password=False)
