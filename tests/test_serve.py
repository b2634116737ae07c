"""The endpoint, as its clients see it, over the deterministic engine: errors, limits, keys, ends.

See test_online.py for the real one.
"""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray
from ray import serve

from pipelines.keys import digest, new_key
from schemas.failures import UsageError
from schemas.settings import Autoscaling, Bounds, EngineSettings, Key, ServeSettings, make_serve_settings
from tests.deterministic import Starts
from tests.endpoint import Endpoint, deploy, errors_of, events_of

KEYS = {"urgent": new_key(), "patient": new_key()}
BOUNDS = Bounds(max_body_bytes=20_000, max_output_tokens=4_000, body_timeout_s=1)
ENGINE = EngineSettings(cores=1)


@pytest.fixture(scope="module")
def endpoint(served_port) -> Endpoint:
    """One engine, no keys."""
    yield deploy("plain", served_port, Starts(), served_names=("test",), engine=ENGINE, replicas=1, bounds=BOUNDS)
    serve.delete("plain")


@pytest.fixture(scope="module")
def guarded(served_port) -> Endpoint:
    """With keys, and with room for two requests in the engine and one before it."""
    keys = tuple(
        Key(role=role, digest=digest(key), most_urgent_priority=-5 if role == "urgent" else 3)
        for role, key in KEYS.items()
    )
    bounds = Bounds(max_ongoing_requests=2, max_queued_requests=1)
    yield deploy(
        "guarded", served_port, Starts(), served_names=("test",), engine=ENGINE, replicas=1, bounds=bounds, keys=keys
    )
    serve.delete("guarded")


def test_an_answer_comes_whole_or_in_parts(endpoint):
    whole = endpoint.post({"prompt": "one two three"})
    assert whole.status_code == 200 and whole.headers["x-request-id"]
    assert whole.json()["choices"][0]["text"] == "three two one"
    parts = events_of(endpoint.post({"prompt": "one two three", "stream": True}))
    assert parts.pop() == "[DONE]"
    assert "".join(json.loads(part)["choices"][0]["text"] for part in parts) == "three two one"


def test_a_first_part_doesnt_wait_for_the_second(endpoint):
    body = {"prompt": "pause:0.5 b c d", "stream": True}
    with httpx.stream("POST", f"{endpoint.url}/v1/completions", json=body, timeout=30) as response:
        came = [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]
    assert len(came) == 4 and came[-1] - came[0] > 1


def test_the_engine_gets_the_bytes_that_were_sent(endpoint):
    body = '{"prompt": "a",  "seed": 12345678901234567, "temperature": 0.10, "user": "\\u00e9"}'
    assert endpoint.post(body.encode()).json()["received"] == body


@pytest.mark.parametrize(
    ("body", "status", "reason", "param"),
    [
        ({"prompt": "a", "temperature": "hot"}, 422, "schema", "temperature"),
        ({"prompt": "a", "top_p": 7}, 400, "out_of_range", "top_p"),
        ({"prompt": "a", "model": "does-not-exist"}, 404, "unknown_model", "model"),
        (b"{not json", 400, "invalid_json", None),
        (b'{"prompt": "a", "prompt": "b"}', 400, "invalid_json", None),
        (b'{"prompt": "\xff"}', 400, "invalid_json", None),
        (b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json", None),
        ([], 422, "schema", None),
        ({}, 400, "empty_prompt", "prompt"),
        ({"prompt": "a " * 9_000}, 400, "prompt_too_long", "prompt"),
        ({"prompt": "a", "max_tokens": 2_001, "n": 2}, 400, "too_many_output_tokens", "max_tokens"),
        ({"prompt": ["a"] * 300}, 400, "too_many_output_tokens", "max_tokens"),
        ({"prompt": "a" * 20_001}, 413, "body_too_large", None),
        ({"prompt": "a", "stream": True, "use_beam_search": True, "n": 2}, 400, "beam_unsupported", "stream"),
        ({"prompt": "a", "stream_options": {}}, 400, "stream_options_without_stream", "stream_options"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "bad_constraint", "structured_outputs"),
        ({"prompt": "fail"}, 400, "asked_to_fail", "prompt"),
        ({"prompt": "fail", "stream": True}, 400, "asked_to_fail", "prompt"),
        ({"prompt": "nan"}, 500, "not_json", None),
    ],
)
def test_an_error_names_the_field_and_has_the_one_form(endpoint, body, status, reason, param):
    assert errors_of(endpoint.post(body)) == (status, reason, param)


def test_a_breach_of_the_schema_is_told_in_both_forms(endpoint):
    body = endpoint.post({"prompt": [1, -2]}).json()
    assert body["detail"] == [{"loc": ["body", "prompt", 1], "msg": body["error"]["message"], "type": "schema"}]


def test_what_isnt_there_has_the_form_of_all_errors(endpoint):
    assert errors_of(endpoint.get("/v1/nothing")) == (404, "unknown_route", None)
    wrong = endpoint.get("/v1/completions")
    assert errors_of(wrong) == (405, "unknown_method", None) and wrong.headers["allow"] == "POST"
    assert errors_of(endpoint.post(b"prompt=a", Content_Type="text/plain")) == (415, "not_json", "Content-Type")


def test_models_are_listed(endpoint):
    (model,) = endpoint.get("/v1/models").json()["data"]
    assert model["id"] == "test" and model["object"] == "model" and model["max_model_len"] > 0
    assert endpoint.get("/v1/models/test").json() == model
    assert errors_of(endpoint.get("/v1/models/other")) == (404, "unknown_model", "model")
    assert endpoint.get("/health").json() == {"status": "ok"}


def test_a_failure_in_the_middle_is_one_event_and_the_end(endpoint):
    *parts, error, done = events_of(endpoint.post({"prompt": "a b break", "stream": True}))
    assert parts and done == "[DONE]"
    assert json.loads(error)["error"]["reason"] == "asked_to_break"
    assert all(json.loads(part)["choices"][0]["finish_reason"] is None for part in parts)


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_deadline_is_the_clients_own_word(endpoint, more):
    started = time.monotonic()
    late = endpoint.post({"prompt": "slow:30 a", **more}, X_Request_Timeout="1")
    assert errors_of(late) == (504, "deadline_exceeded", None) and time.monotonic() - started < 10
    for text in ("0", "-1", "soon", "nan"):
        wrong = endpoint.post({"prompt": "a"}, X_Request_Timeout=text)
        assert errors_of(wrong) == (400, "bad_timeout", "X-Request-Timeout")


@pytest.mark.slow
def test_a_stream_that_says_nothing_is_kept_alive(endpoint):
    body = {"prompt": "pause:16 b", "stream": True}
    with httpx.stream("POST", f"{endpoint.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.count(": keep-alive") == 1 and lines[-1] == "data: [DONE]"


def test_a_deadline_in_the_middle_ends_the_stream(endpoint):
    sent = endpoint.post({"prompt": "pause:0.4 b c d e f g h", "stream": True}, X_Request_Timeout="1")
    *parts, error, done = events_of(sent)
    assert parts and json.loads(error)["error"]["reason"] == "deadline_exceeded" and done == "[DONE]"


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_client_that_goes_away_frees_the_engine(endpoint, more):
    endpoint.wait_until_idle()
    body = {"prompt": "slow:30 a", **more}

    async def go_away():
        async with httpx.AsyncClient() as client:
            sent = asyncio.create_task(client.post(f"{endpoint.url}/v1/completions", json=body))
            while not await asyncio.to_thread(endpoint.num_running):
                await asyncio.sleep(0.05)
            sent.cancel()

    asyncio.run(go_away())
    endpoint.wait_until_idle(2)


def test_a_client_that_goes_away_in_the_middle_frees_the_engine(endpoint):
    body = {"prompt": "pause:0.1 " + "a " * 300, "stream": True}
    with httpx.stream("POST", f"{endpoint.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        assert endpoint.num_running() == 1
    endpoint.wait_until_idle(2)


def test_a_body_that_never_comes_is_given_up(endpoint):
    def slow():
        yield b'{"prompt": '
        time.sleep(3)
        yield b'"a"}'

    kind = {"Content-Type": "application/json"}
    response = httpx.post(f"{endpoint.url}/v1/completions", content=slow(), headers=kind, timeout=30)
    assert errors_of(response) == (408, "body_timeout", None)


def test_a_body_of_no_known_length_is_counted_as_it_comes(endpoint):
    kind = {"Content-Type": "application/json"}
    response = httpx.post(f"{endpoint.url}/v1/completions", content=iter([b"[" * 9_000] * 9), headers=kind, timeout=30)
    assert errors_of(response) == (413, "body_too_large", None)


def test_a_key_is_asked_for(guarded):
    missing = guarded.post({"prompt": "a"})
    assert errors_of(missing) == (401, "missing_key", "Authorization")
    assert missing.headers["www-authenticate"] == "Bearer"
    assert errors_of(guarded.post({"prompt": "a"}, Authorization="Bearer x"))[:2] == (401, "wrong_key")
    assert errors_of(guarded.get("/v1/models"))[:2] == (401, "missing_key")
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/v1/models", Authorization=f"Bearer {KEYS['urgent']}").status_code == 200


def test_without_keys_the_machine_itself_is_answered_alone(endpoint):
    elsewhere = endpoint.post({"prompt": "a"}, Host="page.example.org")
    assert errors_of(elsewhere) == (401, "loopback_only", None)
    assert endpoint.get("/health", Host="page.example.org").status_code == 200
    assert endpoint.post({"prompt": "a"}, Host="localhost:80").status_code == 200


@pytest.mark.parametrize(
    ("role", "asked", "given"),
    [("urgent", -9, -5), ("urgent", -3, -3), ("urgent", None, 0), ("patient", -9, 3), ("patient", 7, 7)],
)
def test_nobody_is_more_urgent_than_his_key(guarded, role, asked, given):
    body = {"prompt": "a"} | ({} if asked is None else {"priority": asked})
    sent = guarded.post(body, Authorization=f"Bearer {KEYS[role]}", X_Vllm_Priority="-99")
    assert sent.json()["priority"] == given


def test_what_doesnt_fit_into_the_queue_is_told_at_once(guarded):
    header = {"Authorization": f"Bearer {KEYS['urgent']}"}

    def send(_):
        started = time.monotonic()
        response = guarded.post({"prompt": "slow:3 a"}, **header)
        return response, time.monotonic() - started

    with ThreadPoolExecutor(12) as clients:
        told = list(clients.map(send, range(12)))
    answered = [response for response, _ in told if response.status_code == 200]
    refused = [(response, seconds) for response, seconds in told if response.status_code != 200]
    assert len(answered) >= 3 and refused
    for response, seconds in refused:
        assert errors_of(response)[:2] == (503, "overloaded") and int(response.headers["retry-after"]) > 0
        assert seconds < 3


def test_what_happens_is_counted(endpoint):
    assert endpoint.post({"prompt": "a b c", "stream": True}).status_code == 200
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = {
        'overnight_requests_total{.*reason="",.*status="200"',
        'overnight_requests_total{.*reason="schema",.*status="422"',
        'overnight_tokens_total{.*kind="completion"',
        "overnight_in_flight{",
        "overnight_first_token_seconds_bucket{",
        "overnight_inter_token_seconds_count{",
        "overnight_request_seconds_sum{",
        "overnight_engine_running{",
        "overnight_engine_waiting{",
        "overnight_engine_kv_share{",
    }
    until = time.monotonic() + 60
    while missing := {one for one in wanted if not re.search(one, text := httpx.get(url, timeout=60).text)}:
        assert time.monotonic() < until, (missing, [line for line in text.splitlines() if "overnight" in line])
        time.sleep(1)


def test_a_dead_engine_is_replaced_and_meanwhile_said_to_be_away(endpoint):
    *parts, error, done = events_of(endpoint.post({"prompt": "a b perish", "stream": True}))
    assert len(parts) == 1 and json.loads(error)["error"]["reason"] == "engine_died" and done == "[DONE]"
    response = endpoint.post({"prompt": "a"})
    assert errors_of(response)[0] == 503 and response.headers["retry-after"]
    assert errors_of(endpoint.get("/health")) == (503, "not_ready", None)
    until = time.monotonic() + 90
    while endpoint.get("/health").status_code != 200 and time.monotonic() < until:
        time.sleep(0.5)
    response = endpoint.post({"prompt": "b a"})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "a b"


# Last: it takes the application away.
def test_what_is_under_way_ends_before_the_engine_does(guarded):
    told = []
    header = {"Authorization": f"Bearer {KEYS['urgent']}"}
    client = threading.Thread(target=lambda: told.append(guarded.post({"prompt": "slow:4 a"}, **header)))
    client.start()
    while not guarded.num_running():
        time.sleep(0.05)
    serve.delete("guarded")
    client.join()
    assert told[0].status_code == 200


def test_settings_say_which_field_is_wrong():
    for field, value, words in (
        ("host", "0.0.0.0", "--host 0.0.0.0: without keys everybody"),  # noqa: S104 - what is refused
        ("host", "example.org", "--host example.org"),
        ("port", 0, "port: found 0"),
        ("root", "v1", "root: found 'v1'"),
        ("bounds", {"max_body_bytes": 1}, "bounds.max_body_bytes: found 1"),
        ("bounds", {"max_queued_requests": 0}, "bounds.max_queued_requests: found 0"),
        ("replicas", {"min_replicas": 3, "max_replicas": 2}, "fewer than min_replicas"),
        ("no_such", 1, "no_such"),
    ):
        with pytest.raises(UsageError) as caught:
            make_serve_settings({field: value})
        assert words in str(caught.value)
    assert make_serve_settings({"host": "::1"}).host == "::1"
    # Whatever else is said of the engine, batch requests give way in one that answers online.
    assert make_serve_settings({"engine": {"max_num_seqs": 8}}).engine.first_token_ms == 1000
    assert make_serve_settings({"host": "0.0.0.0", "allow_unauthenticated": True})  # noqa: S104 - said aloud
    assert ServeSettings(replicas={"min_replicas": 1, "max_replicas": 2}).replicas == Autoscaling(max_replicas=2)
