"""Who may use the endpoint: logins, tokens, keys and their limits, without an endpoint around them."""

import asyncio
import logging
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse

from pipelines import logins
from pipelines.access import Access, headers_of
from pipelines.bearers import Bearers, Expired, Forged
from pipelines.keys import digest, new_key
from pipelines.passwords import hash_password
from pipelines.users import Users
from schemas.failures import Failure
from schemas.settings import Bounds, Key, ServeSettings

PASSWORD = "correct horse battery staple"  # noqa: S105 - of nobody
HASHED = hash_password(PASSWORD)
FILE_KEY = new_key()
FORM = {"username": "ann", "password": PASSWORD}


class Door:
    """An access, as an ingress asks it."""

    def __init__(self, settings: ServeSettings) -> None:
        self.access = Access(settings)
        self.app = FastAPI()
        self.app.post("/token")(self._token)
        self.app.get("/")(self._who)

    async def _token(self, http: HttpRequest):
        return await self.access.logins.answer(http)

    async def _who(self, http: HttpRequest):
        found = await self.access.identify(http)
        if isinstance(found, Failure):
            return JSONResponse(found.body(), found.status_code, headers_of(found))
        return {"role": found.role, "name": found.name, "most_urgent_priority": found.most_urgent_priority}

    def clients(self, *addresses: str) -> list[httpx.AsyncClient]:
        transports = [httpx.ASGITransport(self.app, client=(address, 1)) for address in addresses]
        return [httpx.AsyncClient(transport=transport, base_url="http://here") for transport in transports]

    def log_in(self, address: str = "10.0.0.1", **fields: str) -> httpx.Response:
        return asyncio.run(self.clients(address)[0].post("/token", data=FORM | fields))

    def ask(self, bearer: str | None = None, address: str = "10.0.0.1", **headers: str) -> httpx.Response:
        named = headers if bearer is None else headers | {"Authorization": f"Bearer {bearer}"}
        return asyncio.run(self.clients(address)[0].get("/", headers=named))


@pytest.fixture
def users(tmp_path) -> Users:
    users = Users.open(str(tmp_path / "users.db"), create=True)
    for name, role in {"ann": "online", "bea": "batch", "oda": "operator"}.items():
        users.add(name, role, HASHED)
    users.add("robot", "online", None)
    yield users
    users.close()


@pytest.fixture
def make_door(users, tmp_path):
    key = Key(role="team", digest=digest(FILE_KEY), most_urgent_priority=-3)

    def make(users: str | None = str(tmp_path / "users.db"), **bounds: float) -> Door:
        return Door(ServeSettings(users=users, keys=(key,), bounds=Bounds(**{"user_cache_s": 0, **bounds})))

    return make


@pytest.fixture
def door(make_door) -> Door:
    return make_door()


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is said in the log of logins."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    log, handler = logging.getLogger("overnight.logins"), Keep()
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def failure_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["reason"]


def test_a_name_and_a_password_give_a_token(door):
    granted = door.log_in()
    told = granted.json()
    assert granted.status_code == 200 and told.keys() == {"access_token", "token_type", "expires_in"}
    assert (told["token_type"], told["expires_in"]) == ("bearer", 3600)
    assert granted.headers["cache-control"] == "no-store"
    who = door.ask(told["access_token"]).json()
    assert who == {"role": "online", "name": "user:ann", "most_urgent_priority": 0}


def test_each_role_has_its_priority_and_keys_go_where_tokens_go(door, users):
    asked = {name: door.ask(users.add_key(name)).json() for name in ("ann", "bea", "oda", "robot")}
    assert {name: told["most_urgent_priority"] for name, told in asked.items()} == {
        "ann": 0,
        "bea": 10,
        "oda": -100,
        "robot": 0,
    }
    assert door.ask(FILE_KEY).json() == {"role": "team", "name": "key:team", "most_urgent_priority": -3}


@pytest.mark.parametrize(
    ("sent", "status", "error", "reason"),
    [
        ({"data": FORM | {"password": "wrong"}}, 400, "invalid_grant", "wrong_password"),
        ({"data": FORM | {"username": "nobody"}}, 400, "invalid_grant", "wrong_password"),
        ({"data": FORM | {"username": "ann\0"}}, 400, "invalid_grant", "wrong_password"),
        ({"data": FORM | {"username": "' OR 1=1 --"}}, 400, "invalid_grant", "wrong_password"),
        ({"data": FORM | {"username": "robot", "password": "None"}}, 400, "invalid_grant", "wrong_password"),
        ({"data": FORM | {"grant_type": "client_credentials"}}, 400, "unsupported_grant_type", None),
        ({"data": FORM | {"scope": "admin"}}, 400, "invalid_scope", "unknown_scope"),
        ({"data": {"username": "ann"}}, 400, "invalid_request", "bad_form"),
        ({"data": FORM | {"password": ""}}, 400, "invalid_request", "bad_form"),
        ({"data": FORM | {"password": "x" * 1025}}, 400, "invalid_request", "bad_form"),
        ({"data": {"username": ["ann", "bea"], "password": PASSWORD}}, 400, "invalid_request", "bad_form"),
        ({"content": b"username=ann&password=%ff%fe"}, 400, "invalid_request", "bad_form"),
        ({"content": b"username=ann&password=\xff"}, 400, "invalid_request", "bad_form"),
        ({"content": b"&".join(b"f%d=1" % number for number in range(99))}, 400, "invalid_request", "bad_form"),
        ({"content": b""}, 400, "invalid_request", "bad_form"),
        ({"content": b"username=" + b"a" * 20_000}, 413, "invalid_request", "body_too_large"),
        ({"json": FORM}, 415, "invalid_request", "not_a_form"),
        ({"files": {"username": b"ann"}}, 415, "invalid_request", "not_a_form"),
    ],
)
def test_a_refusal_has_oauths_form_and_repeats_nothing(door, sent, status, error, reason):
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if "content" in sent else {}
    response = asyncio.run(door.clients("10.0.0.1")[0].post("/token", headers=headers, **sent))
    body = response.json()
    assert (response.status_code, body["error"], body["reason"]) == (status, error, reason or error)
    assert body.keys() == {"error", "error_description", "status_code", "reason"} and body["status_code"] == status
    assert body["error_description"].isascii() and not set(body["error_description"]) & set('"\\')
    assert response.headers["cache-control"] == "no-store" and PASSWORD not in response.text
    assert "access_token" not in response.text


def test_without_users_there_is_no_token(make_door):
    body = make_door(users=None).log_in().json()
    assert (body["error"], body["reason"]) == ("unsupported_grant_type", "no_users")
    assert failure_of(make_door(users=None).ask("x")) == (401, "wrong_key")


def test_a_token_says_whose_and_until_when_and_nothing_else_is_believed():
    bearers = Bearers(b"s" * 32, lifetime_s=60)
    claims = bearers.read(bearers.issue("ann", 7))
    assert (claims.name, claims.generation) == ("ann", 7)
    with pytest.raises(Forged):
        Bearers(b"t" * 32, 60).read(bearers.issue("ann", 7))
    short = Bearers(b"s" * 32, lifetime_s=1)
    token = short.issue("ann", 7)
    time.sleep(2.1)
    with pytest.raises(Expired):
        short.read(token)


def test_who_is_disabled_is_refused_at_once_where_nothing_is_remembered(door, users):
    token, key = door.log_in().json()["access_token"], users.add_key("ann")
    assert door.ask(token).status_code == door.ask(key).status_code == 200
    users.change("ann", is_enabled=False)
    assert failure_of(door.ask(token)) == failure_of(door.ask(key)) == (401, "revoked")
    assert door.log_in().json()["reason"] == "wrong_password"
    users.change("ann", is_enabled=True)
    # His keys are good again; tokens of before aren't.
    assert failure_of(door.ask(token)) == (401, "revoked") and door.ask(key).status_code == 200


def test_a_new_password_or_role_and_a_dropped_key_count_from_then_on(door, users):
    token, key = door.log_in().json()["access_token"], users.add_key("ann")
    users.change("ann", role="operator")
    assert door.ask(token).json()["role"] == door.ask(key).json()["role"] == "operator"
    users.change("ann", password=HASHED)
    assert failure_of(door.ask(token)) == (401, "revoked") and door.ask(key).status_code == 200
    users.drop_key(key.split("-")[1])
    assert failure_of(door.ask(key)) == (401, "wrong_key")
    later = door.log_in().json()["access_token"]
    users.remove("ann")
    assert failure_of(door.ask(later)) == (401, "revoked")


def test_what_was_read_is_believed_for_a_while_alone(make_door, users):
    door = make_door(user_cache_s=1)
    key = users.add_key("ann")
    assert door.ask(key).status_code == 200
    users.change("ann", is_enabled=False)
    assert door.ask(key).status_code == 200
    time.sleep(1.1)
    assert failure_of(door.ask(key)) == (401, "revoked")


def test_another_secret_behind_a_keys_id_is_refused(door, users):
    key = users.add_key("ann")
    other = key[:-43] + users.add_key("ann")[-43:]
    assert failure_of(door.ask(other)) == failure_of(door.ask(key[:-1])) == (401, "wrong_key")


@pytest.mark.parametrize(
    ("header", "reason", "challenge"),
    [
        (None, "missing_key", "Bearer"),
        ("", "missing_key", "Bearer"),
        ("Bearer", "missing_key", "Bearer"),
        ("Basic YW5uOng=", "missing_key", "Bearer"),
        ("Bearer x", "wrong_key", 'Bearer error="invalid_token"'),
        ("Bearer " + "x" * 100_000, "wrong_key", 'Bearer error="invalid_token"'),
        ("Bearer a.b.c", "wrong_key", 'Bearer error="invalid_token"'),
    ],
)
def test_nobody_else_is_let_in_and_is_told_how(door, header, reason, challenge):
    response = door.ask(**({} if header is None else {"Authorization": header}))
    assert failure_of(response) == (401, reason) and response.headers["www-authenticate"] == challenge


def test_two_headers_are_one_too_many(door):
    headers = [("Authorization", f"Bearer {FILE_KEY}"), ("Authorization", "Bearer x")]
    response = asyncio.run(door.clients("10.0.0.1")[0].get("/", headers=headers))
    assert failure_of(response) == (401, "missing_key")


def test_without_users_and_keys_loopback_alone_is_answered():
    door, said = Door(ServeSettings()), Door(ServeSettings(allow_unauthenticated=True))
    assert door.ask(address="127.0.0.1", Host="localhost").json()["role"] == "anonymous"
    assert failure_of(door.ask(address="127.0.0.1", Host="page.example.org")) == (401, "loopback_only")
    assert failure_of(door.ask(address="10.0.0.1", Host="localhost")) == (401, "loopback_only")
    assert said.ask(address="10.0.0.1").json()["role"] == "anonymous"


def test_a_database_that_is_gone_lets_nobody_in_but_the_keys_of_the_file(door, users, tmp_path):
    token, key = door.log_in().json()["access_token"], users.add_key("ann")
    (tmp_path / "users.db").write_bytes(b"no database " * 400)
    assert failure_of(door.ask(token)) == failure_of(door.ask(key)) == (503, "users_unavailable")
    refused = door.log_in()
    assert (refused.status_code, refused.json()["error"]) == (503, "temporarily_unavailable")
    assert int(refused.headers["retry-after"]) > 0
    assert door.ask(FILE_KEY).status_code == 200


def test_a_role_has_so_many_requests_a_minute(users, tmp_path):
    settings = ServeSettings(users=str(tmp_path / "users.db"), roles={"online": {"requests_per_minute": 3}})
    door = Door(settings)
    token, key, other = door.log_in().json()["access_token"], users.add_key("ann"), users.add_key("robot")
    # All that are one user's count together.
    assert [door.ask(one).status_code for one in (token, key, token)] == [200] * 3
    refused = door.ask(key)
    assert failure_of(refused) == (429, "rate_limited") and 1 <= int(refused.headers["retry-after"]) <= 120
    assert refused.json()["error"]["type"] == "RateLimitError"
    assert door.ask(other).status_code == 200


def test_guessing_is_slowed_and_others_go_on(make_door):
    door = make_door(logins_per_minute=3)
    answers = [door.log_in(password=f"guess {number}") for number in range(5)]
    assert [answer.status_code for answer in answers] == [400] * 3 + [429] * 2
    refused = answers[-1]
    assert (refused.json()["error"], refused.json()["reason"]) == ("slow_down", "too_many_logins")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    # Nor is a right one judged, from wherever; a name that there isn't is slowed the same.
    assert door.log_in("10.0.0.2").status_code == 429
    assert [door.log_in("10.0.0.3", username="nobody").status_code for _ in range(4)] == [400] * 3 + [429]
    assert door.log_in("10.0.0.4", username="bea").status_code == 200


def test_one_address_doesnt_try_many_names(make_door):
    door = make_door(logins_per_minute=2)
    sent = [door.log_in("10.0.0.9", username=f"name{number}").status_code for number in range(8)]
    assert sent == [400] * 6 + [429] * 2
    assert door.log_in("10.0.0.10").status_code == 200


def test_many_at_once_are_counted_before_they_are_judged(make_door):
    door = make_door(logins_per_minute=4)

    async def flood():
        clients = door.clients(*(f"10.0.1.{number}" for number in range(20)))
        return await asyncio.gather(*(client.post("/token", data=FORM | {"password": "x"}) for client in clients))

    told = [response.status_code for response in asyncio.run(flood())]
    assert told.count(400) == 4 and set(told) == {400, 429}


def test_what_waits_to_be_judged_is_bounded(make_door, monkeypatch):
    monkeypatch.setattr(logins, "_MOST_WAITING", 4)
    door = make_door(logins_per_minute=1000)

    async def flood():
        clients = door.clients(*["10.0.1.1"] * 12)
        return await asyncio.gather(*(client.post("/token", data=FORM | {"password": "x"}) for client in clients))

    told = [response.status_code for response in asyncio.run(flood())]
    assert told.count(503) == 8 and told.count(400) == 4


def test_an_unknown_user_takes_as_long_as_a_wrong_password(make_door, users):
    """A name that isn't judged would answer some hundred times sooner."""
    door, took = make_door(logins_per_minute=1000), {}
    users.add("out", "online", HASHED)
    users.change("out", is_enabled=False)

    async def measure():
        (client,) = door.clients("10.0.0.1")
        for _ in range(5):
            for name in ("ann", "nobody", "robot", "out"):
                started = time.perf_counter()
                await client.post("/token", data={"username": name, "password": "a wrong password"})
                took.setdefault(name, []).append(time.perf_counter() - started)

    asyncio.run(measure())
    typical = {name: statistics.median(seconds) for name, seconds in took.items()}
    assert max(typical.values()) < 2 * min(typical.values()), typical


def test_passwords_are_judged_off_the_event_loop(door):
    threads, verify = [], door.access.logins._verifier.verify

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return verify(*arguments)

    door.access.logins._verifier.verify = noted
    assert door.log_in().status_code == 200 and threads[0].startswith("passwords")


def test_the_log_names_users_but_no_strangers_and_no_secret(door):
    with logged() as said:
        door.log_in(password="not the password")  # noqa: S106 - of nobody
        door.log_in(username="typed-my-password-here")
    assert said == ["a login from 10.0.0.1 failed: ann", "a login from 10.0.0.1 failed: no such user"]
