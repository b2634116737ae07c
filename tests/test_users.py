"""Users, their keys and their database, and the command that writes it."""

import json
import stat

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from jobs import cli
from jobs.exits import ExitStatus
from pipelines.passwords import Verifier, hash_password
from pipelines.throttle import NUM_BUCKETS, LoginRates, Rates
from pipelines.users import Users, UsersUnavailable, has_password, key_id, locate
from schemas.failures import UsageError
from schemas.settings import ROLES, ServeSettings, make_serve_settings, parse_roles
from tests.conftest import ROOT, overnight

PASSWORD = "correct horse battery staple"  # noqa: S105 - of nobody


@pytest.fixture
def database(tmp_path) -> Users:
    users = Users.open(str(tmp_path / "users.db"), create=True)
    yield users
    users.close()


def command(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
    """Status and everything that was said."""
    done = CliRunner().invoke(cli.app, ["users", *arguments], input=stdin)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_password_is_kept_as_an_argon2_hash_and_known_in_every_form():
    hashed = hash_password("caf\u00e9 caf\u00e9 caf\u00e9")
    assert hashed.startswith("$argon2id$") and hashed != hash_password("caf\u00e9 caf\u00e9 caf\u00e9")
    verifier = Verifier()
    assert verifier.verify("cafe\u0301 cafe\u0301 cafe\u0301", hashed)
    assert not verifier.verify("cafe cafe cafe", hashed)
    assert not verifier.verify("", None) and not verifier.verify("\udc80" * 20, hashed)
    assert not verifier.verify("x", "no hash at all")


@pytest.mark.parametrize("password", ["", "x" * 11, "x" * 1025])
def test_a_password_has_bounds_and_isnt_shown(password):
    with pytest.raises(UsageError, match=f"has {len(password)} characters") as caught:
        hash_password(password)
    assert not password or password not in str(caught.value)


def test_a_user_and_his_keys_are_found_and_a_digest_alone_is_kept(database, tmp_path):
    database.add("ann", "batch", hash_password(PASSWORD))
    key = database.add_key("ann", "nightly, s3")
    assert database.find("ann").role == "batch" and database.find("bob") is None
    found, owner = database.find_key(key_id(key))
    assert owner == database.find("ann") and found.label == "nightly, s3"
    kept = (tmp_path / "users.db").read_bytes()
    assert found.digest.encode() in kept and key.encode() not in kept and key[-43:].encode() not in kept
    assert PASSWORD.encode() not in kept
    database.drop_key(found.id)
    assert database.find_key(found.id) is None


def test_what_makes_tokens_worthless_counts_the_generation_on(database):
    database.add("ann", "online", None)
    seen = [database.find("ann").generation]
    for change in ({"is_enabled": False}, {"is_enabled": True}, {"password": "x"}, {"role": "batch"}):
        database.change("ann", **change)
        seen.append(database.find("ann").generation)
    first = seen[0]
    assert seen == [first, first + 1, first + 1, first + 2, first + 2]
    # Whoever has the name next isn't the one who was removed.
    key = database.add_key("ann")
    database.remove("ann")
    database.add("ann", "online", None)
    assert database.find("ann").generation not in seen and database.find_key(key_id(key)) is None


def test_a_key_is_looked_up_by_its_index(database):
    """However many there are: no scan."""
    asked: list[str] = []
    sa.event.listen(database._engine, "before_cursor_execute", lambda *told: asked.append(told[2]))
    database.add("ann", "online", None)
    key = database.add_key("ann")
    asked.clear()
    database.find_key(key_id(key))
    database.find("ann")
    with database._engine.connect() as connection:
        plans = [str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", ("x",)).all()) for sql in asked[:]]
    assert len(plans) == 3 and all("SEARCH" in plan and "SCAN" not in plan for plan in plans)


def test_its_file_is_the_owners_alone(database, tmp_path):
    assert stat.S_IMODE((tmp_path / "users.db").stat().st_mode) == 0o600


def test_all_who_open_it_have_one_secret(database, tmp_path):
    again = Users.open(str(tmp_path / "users.db"), create=True)
    assert again.secret() == database.secret() and len(again.secret()) == 32
    assert Users.open(f"sqlite:///{tmp_path}/users.db").secret() == database.secret()


def test_where_it_is_doesnt_depend_on_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate("users.db") == locate("sqlite:///users.db") == f"sqlite:///{tmp_path}/users.db"
    assert locate("postgresql://host/name") == "postgresql://host/name"
    assert has_password("postgresql://ann:hidden@host/name") and not has_password("postgresql://ann@host/name")
    assert not has_password("users.db") and not has_password("://")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "found nothing"),
        ("://", "can't be read"),
        ("nowhere/users.db", "there is no such file"),
        ("nosuch://ann:hidden@host/name", "its driver isn't installed"),
        (str(ROOT / "README.md"), "it can't be opened (file is not a database)"),
    ],
)
def test_what_cant_be_opened_is_said_without_secrets(given, words):
    with pytest.raises(UsageError) as caught:
        Users.open(given)
    assert words in str(caught.value) and "hidden" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_database_of_something_else_holds_no_users(tmp_path):
    (tmp_path / "empty.db").touch()
    with pytest.raises(UsageError, match="holds no users"):
        Users.open(str(tmp_path / "empty.db"))


def test_a_database_that_breaks_says_so(database, tmp_path):
    (tmp_path / "users.db").write_bytes(b"no database " * 400)
    with pytest.raises(UsersUnavailable):
        database.find("ann")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_adds_changes_and_lists(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERNIGHT_USERS", str(tmp_path / "users.db"))
    assert command("add", "ann", "--role", "operator", stdin=f"{PASSWORD}\n") == (0, "")
    assert command("add", "bob", "--no-password", "--role", "batch") == (0, "")
    status, key = command("add-key", "bob", "--label", "nightly")
    assert status == 0 and (id := key_id(key.strip()))
    assert command("disable", "ann")[0] == command("role", "bob", "online")[0] == 0
    listed = [json.loads(line) for line in command("list", "--json")[1].splitlines()]
    assert [(one["name"], one["role"], one["is_enabled"], one["has_password"]) for one in listed] == [
        ("ann", "operator", False, True),
        ("bob", "online", True, False),
    ]
    assert [(one["id"], one["label"]) for one in listed[1]["keys"]] == [(id, "nightly")]
    shown = command("list")[1]
    assert "ann: operator, disabled" in shown and f"key {id}" in shown
    assert key.strip()[-43:] not in shown and "argon2" not in shown
    assert command("enable", "ann")[0] == command("drop-key", id)[0] == command("remove", "bob")[0] == 0
    assert command("password", "ann", stdin="another password\n")[0] == 0
    assert Verifier().verify("another password", Users.open(str(tmp_path / "users.db")).find("ann").password)
    assert [json.loads(line)["name"] for line in command("list", "--json")[1].splitlines()] == ["ann"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (("add", "ann"), f"{PASSWORD}\n", "ann: there is a user of this name"),
        (("add", "a b", "--no-password"), None, "'a b': expected a name"),
        (("add", "bob"), "", "found no password on standard input"),
        (("add", "bob"), "short\n", "the password has 5 characters"),
        (("add", "bob", "--role", "king"), None, "king"),
        (("password", "bob"), f"{PASSWORD}\n", "bob: there is no user of this name"),
        (("disable", "bob"), None, "bob: there is no user of this name"),
        (("remove", "bob"), None, "bob: there is no user of this name"),
        (("add-key", "bob"), None, "bob: there is no user of this name"),
        (("add-key", "ann", "--label", "\x1b[2J"), None, "expected a label"),
        (("drop-key", "0123"), None, "0123: there is no key of this id"),
        (("list", "--users", "postgresql://ann:hidden@host/name"), None, "can be seen by everybody"),
    ],
)
def test_wrong_usage_of_the_command_is_said(tmp_path, monkeypatch, arguments, stdin, words):
    monkeypatch.setenv("OVERNIGHT_USERS", str(tmp_path / "users.db"))
    assert command("add", "ann", "--no-password")[0] == 0
    status, said = command(*arguments, stdin=stdin)
    assert status == ExitStatus.USAGE and words in said and "hidden" not in said and PASSWORD not in said


def test_the_command_line_has_no_place_for_a_password():
    shown = command("add", "--help")[1] + command("password", "--help")[1]
    assert "--password" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--users", "nowhere.db"), "nowhere.db: there is no such file"),
        (("--users", "postgresql://ann:hidden@host/name"), "can be seen by everybody"),
        (("--role", "online=1"), "--role online=1: expected ROLE.FIELD=VALUE"),
        (("--role", "king.requests_per_minute=1"), "--role king: no such role"),
        (("--role", "online.requests_per_minute=-1"), "--role requests_per_minute=-1"),
        (("--role", "online.speed=1"), "--role speed: no such field"),
    ],
)
def test_serve_says_what_is_wrong_with_users_and_roles(arguments, words):
    done = overnight("serve", *arguments)
    assert done.status == ExitStatus.USAGE and words in done.err and len(done.err.splitlines()) == 1
    assert "hidden" not in done.err


def test_roles_are_changed_field_by_field(tmp_path):
    changed = make_serve_settings({"roles": parse_roles(["online.requests_per_minute=7"])})
    assert changed.roles["online"].requests_per_minute == 7 and changed.roles["online"].most_urgent_priority == 0
    assert changed.roles["batch"] == ROLES["batch"] and ServeSettings().roles == dict(ROLES)
    with pytest.raises(UsageError, match="king"):
        make_serve_settings({"roles": {"king": {"most_urgent_priority": 0, "requests_per_minute": 1}}})


def test_users_let_an_endpoint_listen_to_others_and_their_url_isnt_shown():
    settings = make_serve_settings({"host": "0.0.0.0", "users": "postgresql://ann:hidden@host/name"})  # noqa: S104
    assert settings.is_guarded and "hidden" not in repr(settings)
    assert ServeSettings.model_validate(settings.model_dump()).users == settings.users


# --- how often --------------------------------------------------------------------------------------------------------


def test_requests_are_counted_by_caller_and_divided_among_processes():
    rates = Rates(num_doors=2)
    assert [rates.wait_s("ann", 6) for _ in range(3)] == [None] * 3
    assert 1 <= rates.wait_s("ann", 6) <= 120
    assert rates.wait_s("bob", 6) is None
    assert all(rates.wait_s("carl", 0) is None for _ in range(100))


def test_attempts_to_log_in_are_counted_by_name_and_by_address():
    rates = LoginRates(per_minute=5, num_doors=1)
    assert [rates.wait_s("ann", f"10.0.0.{number}") for number in range(5)] == [None] * 5
    assert rates.wait_s("ann", "10.0.0.9") >= 1
    # One address, many names; a whole network of IPv6 is one.
    sent = [rates.wait_s(f"name{number}", f"2001:db8::{number:x}") for number in range(20)]
    assert sent[:15] == [None] * 15 and None not in sent[15:]
    assert rates.wait_s("name99", "2001:db8:0:1::1") is None


def test_nobody_is_kept_out_by_others_where_he_has_logged_in_before():
    rates = LoginRates(per_minute=5, num_doors=1)
    assert rates.wait_s("ann", "10.0.0.1") is None
    rates.succeeded("ann", "10.0.0.1")
    for number in range(50):
        rates.wait_s("ann", f"10.1.0.{number}")
    assert rates.wait_s("ann", "10.1.0.1") >= 1
    assert [rates.wait_s("ann", "10.0.0.1") for _ in range(5)] == [None] * 5
    assert rates.wait_s("ann", "10.0.0.1") >= 1


def test_strangers_fill_no_memory():
    rates = LoginRates(per_minute=5, num_doors=1)
    for number in range(20_000):
        rates.wait_s(f"name{number}", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    # The window that runs, and at its turn the one before.
    assert 1000 < rates.num_counted <= 4 * NUM_BUCKETS
