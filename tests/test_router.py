"""Two engines behind one door: who goes where."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray import serve

from schemas.settings import EngineSettings
from tests.deterministic import Starts
from tests.endpoint import Endpoint, deploy

BEGINNING = "the river wind stone letter garden night bread " * 20


@pytest.fixture(scope="module")
def pair(served_port) -> Endpoint:
    engine = EngineSettings(cores=1)
    made = deploy("pair", served_port, Starts(), served_names=("test",), engine=engine, replicas=2)
    # The ingress hears of the second engine a moment after Serve says that it is up.
    until, seen, number = time.monotonic() + 60, set(), 0
    while len(seen) < 2 and time.monotonic() < until:
        number += 1
        seen |= set(engines(made, [{"prompt": "a", "session_id": f"first {number}"}]))
    yield made
    serve.delete("pair")


def engines(endpoint, bodies):
    """Which engine answers each of some requests, sent one after the other."""
    return [endpoint.post(body).json()["engine"] for body in bodies]


def test_a_session_stays_with_its_engine(pair):
    by_session = [
        set(engines(pair, [{"prompt": f"{n}", "session_id": f"session {number}"} for n in range(2)]))
        for number in range(40)
    ]
    assert all(len(found) == 1 for found in by_session)
    assert len(set.union(*by_session)) == 2


def test_prompts_that_begin_alike_meet_in_one_engine(pair):
    by_beginning = [
        set(engines(pair, [{"prompt": f"{number} {BEGINNING} {n}"} for n in range(2)])) for number in range(40)
    ]
    assert all(len(found) == 1 for found in by_beginning)
    assert len(set.union(*by_beginning)) == 2


def test_a_crowd_is_shared_out(pair):
    with ThreadPoolExecutor(40) as clients:
        body = {"prompt": "slow:3 a", "session_id": "everybody's"}
        found = list(clients.map(lambda _: pair.post(body).json()["engine"], range(40)))
    # Who comes while both are as busy is sent to either by chance; without sharing out, one would have all.
    assert min(found.count(one) for one in set(found)) >= 4 and len(set(found)) == 2
