"""What somebody tries who may not, or who may and wants more: against a running application."""

import base64
import json
import re
import socket
import string
import time
from urllib.parse import urlsplit

import httpx
import jwt
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from ray import serve
from schemathesis.generation import GenerationMode

from pipelines.ingress import app
from pipelines.keys import digest, new_key
from pipelines.passwords import hash_password
from pipelines.users import Users
from schemas.settings import EngineSettings, Key
from tests.deterministic import Starts
from tests.endpoint import Endpoint, deploy, errors_of

PASSWORD = "correct horse battery staple"  # noqa: S105 - of nobody
FILE_KEY = new_key()
# What is answered to everybody.
PUBLIC = {("GET", "/health"), ("GET", "/openapi.json"), ("POST", "/token")}
NOBODY = {"Authorization": "Bearer nobodys"}


@pytest.fixture(scope="module")
def users(tmp_path_factory) -> Users:
    users = Users.open(str(tmp_path_factory.mktemp("users") / "users.db"), create=True)
    for name, role in {"ann": "online", "bea": "batch", "oda": "operator", "eve": "online"}.items():
        users.add(name, role, hash_password(PASSWORD))
    yield users
    users.close()


@pytest.fixture(scope="module")
def endpoint(served_port, users) -> Endpoint:
    more = {
        "keys": (Key(role="team", digest=digest(FILE_KEY)),),
        "users": users._engine.url.render_as_string(),
        "roles": {"batch": {"requests_per_minute": 8}},
        "bounds": {"user_cache_s": 0.5},
        "engine": EngineSettings(cores=1),
    }
    yield deploy("secure", served_port, Starts(), served_names=("test",), replicas=1, **more)
    serve.delete("secure")


@pytest.fixture(scope="module")
def tokens(endpoint) -> dict[str, str]:
    forms = {name: {"username": name, "password": PASSWORD} for name in ("ann", "bea", "oda", "eve")}
    granted = {name: httpx.post(f"{endpoint.url}/token", data=form, timeout=60) for name, form in forms.items()}
    return {name: response.json()["access_token"] for name, response in granted.items()}


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def send_raw(endpoint: Endpoint, method: str, path: str, *headers: bytes, body: bytes = b"") -> bytes:
    """The whole answer to a request of just these bytes."""
    url = urlsplit(endpoint.url)
    first = f"{method} {url.path}{path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n".encode()
    told = b"".join(b"%s\r\n" % header for header in headers) + b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
        connection.sendall(first + told + body)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_every_route_is_protected_or_on_the_short_list(endpoint):
    routes = {(method, route.path) for route in app.routes for method in route.methods}
    assert routes >= PUBLIC and len(routes) > len(PUBLIC)
    for method, path in sorted(routes):
        url = endpoint.url + re.sub(r"\{[^}]*\}", "test", path)
        for headers in ({}, NOBODY):
            told = httpx.request(method, url, headers=headers, timeout=60)
            if (method, path) in PUBLIC:
                assert told.status_code not in {401, 403, 500}, path
            else:
                assert errors_of(told)[0] == 401, path
                assert told.headers["www-authenticate"].startswith("Bearer"), path


@pytest.mark.parametrize("number", [5, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("who", [pytest.param(None, marks=pytest.mark.slow), "oda"])
def test_whatever_is_drawn_is_a_401_without_a_token_and_no_fault_with_one(endpoint, tokens, who, number):
    described = schemathesis.openapi.from_url(f"{endpoint.url}/openapi.json")
    operations = {
        (path, method.upper())
        for path, methods in described.raw_schema["paths"].items()
        for method, operation in methods.items()
        if operation.get("security")
    }
    assert ("/v1/completions", "POST") in operations
    told = []

    def send(path, method, mode):
        @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=described[path][method].as_strategy(generation_mode=mode))
        def draw(case):
            # Nobody can keep the deadlines that are drawn.
            case.headers = bearing(tokens[who]) if who is not None else {}
            told.append((path, case.call(timeout=120).status_code))

        draw()

    for path, method in sorted(operations):
        for mode in [GenerationMode.POSITIVE, GenerationMode.NEGATIVE][: 2 if method == "POST" else 1]:
            send(path, method, mode)
    statuses = {status for _, status in told}
    assert statuses == {401} if who is None else max(statuses) < 500 and 200 in statuses, told


def test_tokens_and_keys_are_good(endpoint, users, tokens):
    for bearer in (*tokens.values(), users.add_key("ann"), FILE_KEY):
        assert endpoint.get("/v1/models", **bearing(bearer)).status_code == 200


def _b64(value) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def bad_tokens(secret: bytes, good: str) -> dict[str, str]:
    """Tokens that look like ours, by what is wrong with them."""
    header, payload, signature = good.split(".")
    claims = jwt.decode(good, options={"verify_signature": False})
    now = int(time.time())

    def sign(changed, key=secret, algorithm="HS256", **head):
        return jwt.encode(claims | changed, key, algorithm, headers={"typ": "at+jwt"} | head)

    without = {name: value for name, value in claims.items() if name != "exp"}
    return {
        "expired": sign({"exp": now - 1}),
        "of the future": sign({"iat": now + 3600}),
        "other secret": sign({}, key=b"x" * 32),
        "other algorithm": sign({}, key=secret * 2, algorithm="HS512"),
        "secret, other algorithm": sign({}, algorithm="HS384"),
        "alg none": f"{_b64({'alg': 'none', 'typ': 'at+jwt'})}.{payload}.",
        "alg None": f"{_b64({'alg': 'nOnE', 'typ': 'at+jwt'})}.{payload}.{signature}",
        "alg of a public key": f"{_b64({'alg': 'RS256', 'typ': 'at+jwt'})}.{payload}.{signature}",
        "key of its own": f"{_b64({'alg': 'HS256', 'typ': 'at+jwt', 'jwk': {'kty': 'oct', 'k': 'eA'}})}.{payload}."
        + signature,
        "other name": f"{header}.{_b64(claims | {'sub': 'oda'})}.{signature}",
        "truncated": good[:-1],
        "without signature": f"{header}.{payload}.",
        "half": f"{header}.{payload}",
        "longer": good + "A",
        "never ends": jwt.encode(without, secret, "HS256", headers={"typ": "at+jwt"}),
        "ends as text": sign({"exp": "never"}),
        "other issuer": sign({"iss": "somebody"}),
        "other audience": sign({"aud": "somewhere"}),
        "other type": sign({}, typ="JWT"),
        "nobody's": sign({"sub": "nobody"}),
        "name of a list": f"{header}.{_b64(claims | {'sub': ['ann']})}.{signature}",
        "older generation": sign({"generation": claims["generation"] - 1}),
        "text as generation": sign({"generation": "0"}),
        "no JSON": f"{header}.{_b64(b'{{{')}.{signature}",
        "dots": "." * 3000,
        "deep": f"{_b64(b'[' * 20_000)}.{payload}.{signature}",
    }


def test_tokens_that_arent_ours_or_are_no_more_are_refused(endpoint, users, tokens):
    for what, token in bad_tokens(users.secret(), tokens["ann"]).items():
        refused = endpoint.get("/v1/models", **bearing(token))
        assert errors_of(refused)[0] == 401, what
        assert refused.headers["www-authenticate"] == 'Bearer error="invalid_token"', what
        assert token not in refused.text, what
    expired = bad_tokens(users.secret(), tokens["ann"])["expired"]
    assert errors_of(endpoint.get("/v1/models", **bearing(expired)))[1] == "expired_token"


def test_a_disabled_user_is_refused_within_the_time_that_is_said(endpoint, users, tokens):
    key = users.add_key("eve")
    assert endpoint.get("/v1/models", **bearing(tokens["eve"])).status_code == 200
    users.change("eve", is_enabled=False)
    time.sleep(0.6)
    for bearer in (tokens["eve"], key):
        assert errors_of(endpoint.post({"prompt": "a"}, **bearing(bearer)))[:2] == (401, "revoked")


@pytest.mark.parametrize(
    ("who", "asked", "given"),
    [("ann", -9, 0), ("ann", 3, 3), ("oda", -9, -9), ("oda", -10_000, -100), ("oda", None, 0), ("bea", -9, 10)],
)
def test_nobody_is_more_urgent_than_his_role(endpoint, tokens, who, asked, given):
    body = {"prompt": "a"} | ({} if asked is None else {"priority": asked})
    sent = endpoint.post(body, **bearing(tokens[who]), X_Vllm_Priority="-99", X_Role="operator")
    assert sent.json()["priority"] == given


def test_a_role_has_so_many_requests(endpoint, tokens):
    told = [endpoint.get("/v1/models", **bearing(tokens["bea"])) for _ in range(10)]
    refused = told[-1]
    assert errors_of(refused)[:2] == (429, "rate_limited") and int(refused.headers["retry-after"]) > 0
    assert endpoint.get("/v1/models", **bearing(tokens["ann"])).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "/etc/passwd",
        "test/../../health",
        "file:///etc/passwd",
        "test%00.json",
        "..\\..\\etc",
        "%",
        "%ff",
        "a" * 8000,
    ],
)
def test_names_of_models_are_no_paths(endpoint, tokens, name):
    header = f"Authorization: Bearer {tokens['ann']}".encode()
    told = send_raw(endpoint, "GET", f"/v1/models/{name}", header)
    assert told.startswith(b"HTTP/1.1 404") and b"root:" not in told
    refused = endpoint.post({"prompt": "a", "model": name}, **bearing(tokens["ann"]))
    assert errors_of(refused) == (404, "unknown_model", "model") and len(refused.content) < 1000


@pytest.mark.parametrize("kind", ["NUL", "CR", "LF", "latin", "UTF-8", "long", "quotes"])
@pytest.mark.parametrize("field", [b"Authorization: Bearer ", b"X-Request-ID: ", b"X-Request-Timeout: "])
def test_headers_take_nothing_with_them(endpoint, field, kind):
    told = {
        "NUL": b"a\0b",
        "CR": b"a\rSet-Cookie: a=b",
        "LF": b"a\nSet-Cookie: a=b",
        "latin": b"\xe9\xff",
        "UTF-8": "a\u2028é\U0001f600".encode(),
        "long": b"a" * 20_000,
        "quotes": b"\"><script>'; DROP TABLE overnight_users",
    }[kind]
    own = b"" if field.startswith(b"Auth") else b"Authorization: Bearer %s\r\n" % FILE_KEY.encode()
    kind_of_body = b"Content-Type: application/json"
    answer = send_raw(endpoint, "POST", "/v1/completions", own + field + told, kind_of_body, body=b'{"prompt": "a"}')
    status = int(answer.split(b" ", 2)[1])
    if field.startswith(b"X-Request-ID") and kind == "latin":
        # Serve's own proxy says so, of ids that aren't UTF-8; nothing comes through to the application.
        assert status == 500 and answer.endswith(b"\r\n\r\nInternal Server Error")
        return
    assert status in ({400, 401, 431} if not own else {200, 400, 431}), answer[:200]
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"set-cookie: a=b" not in head.split(b"\r\n")
    assert endpoint.get("/v1/models", **bearing(FILE_KEY)).status_code == 200


def test_a_body_of_100_mb_isnt_read(endpoint, tokens):
    """Nor does it matter whether its sender may: 413 of one who may, 401 of another."""
    kind = b"Content-Type: application/json"
    url = urlsplit(endpoint.url)
    for token, status in ((tokens["ann"], 413), ("nobodys", 401)):
        first = f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        headers = f"Authorization: Bearer {token}\r\nContent-Length: {100 << 20}\r\n".encode() + kind + b"\r\n\r\n"
        with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
            connection.sendall(first.encode() + headers + b'{"prompt": "')
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 %d" % status)
    # All of it sent, whatever is said on the way.
    try:
        whole = endpoint.post(b'{"prompt": "' + b"a" * (100 << 20) + b'"}', **bearing(tokens["ann"]))
        assert errors_of(whole)[:2] == (413, "body_too_large")
    except httpx.TransportError:
        pass
    assert endpoint.post({"prompt": "b a"}, **bearing(tokens["ann"])).status_code == 200


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("field", ["prompt", "extra", "structured_outputs"])
def test_json_that_is_10_000_deep_is_refused(endpoint, tokens, opening, field):
    closing = b"]" if opening == b"[" else b"}"
    body = b'{"prompt": "a", "%s": %s1%s}' % (field.encode(), opening * 10_000, closing * 10_000)
    assert errors_of(endpoint.post(body, **bearing(tokens["ann"])))[0] in {400, 422}


def test_a_template_in_a_request_is_text(endpoint, tokens):
    prompt = "{{7*7}} {%for_a_in_b%} ${7*7} {{config}}"
    body = {"prompt": prompt, "chat_template": "{{ ''.__class__.__mro__ }}"}
    told = endpoint.post(body, **bearing(tokens["ann"])).json()
    assert told["choices"][0]["text"] == " ".join(reversed(prompt.split()))


def test_a_form_of_everything_gets_no_token_and_no_fault(endpoint):
    for number, sent in enumerate(
        (
            b"",
            b"&" * 2000,
            b"username=%00&password=%00",
            b"username=ann&username=oda&password=x",
            b"username=ann&password=" + b"%F0%9F%98%80" * 300,
            b"grant_type=password&username[]=ann&password=x",
            string.printable.encode(),
            bytes(range(256)),
        )
    ):
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        told = httpx.post(f"{endpoint.url}/token", content=sent, headers=kind, timeout=60)
        assert told.status_code in {400, 429} and isinstance(told.json()["error"], str), (number, told.text)
        assert told.headers["cache-control"] == "no-store"


def test_nothing_secret_is_described_or_stands_in_a_process_list(endpoint, users, tokens):
    key = users.add_key("ann")
    described = endpoint.get("/openapi.json").text
    schemes = json.loads(described)["components"]["securitySchemes"]
    assert schemes["OAuth2PasswordBearer"]["flows"]["password"] == {"scopes": {}, "tokenUrl": "token"}
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    lists = "\n".join(" ".join(one.cmdline()) for one in processes if one.is_running())
    assert "ServeReplica" in lists
    for secret in (PASSWORD, key, FILE_KEY, tokens["ann"], users.secret().hex(), "users.db"):
        assert secret not in described and secret not in lists
