"""The endpoint against its own description, over drawn requests, valid ones and others, by schemathesis."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from ray import serve
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from schemas.settings import Bounds, EngineSettings
from tests.deterministic import Starts
from tests.endpoint import Endpoint, deploy

# A valid body may still ask for what can't be served: a 400 in the contract, which this check doesn't know of.
UNKNOWING = [positive_data_acceptance]


@pytest.fixture(scope="module")
def endpoint(served_port) -> Endpoint:
    bounds = Bounds(max_body_bytes=1 << 20)
    engine = EngineSettings(cores=1)
    yield deploy("drawn", served_port, Starts(), served_names=("test",), engine=engine, replicas=1, bounds=bounds)
    serve.delete("drawn")


@pytest.fixture(scope="module")
def described(endpoint):
    return schemathesis.openapi.from_url(f"{endpoint.url}/openapi.json")


def is_short(name, value):
    try:
        return name.lower() == "x-request-timeout" and 0 < float(value) < 10
    except ValueError:
        return False


@pytest.mark.parametrize("number", [25, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        ("POST", "/v1/completions", GenerationMode.POSITIVE),
        ("POST", "/v1/completions", GenerationMode.NEGATIVE),
        ("GET", "/v1/models", GenerationMode.POSITIVE),
        ("GET", "/v1/models/{model}", GenerationMode.POSITIVE),
        ("GET", "/health", GenerationMode.POSITIVE),
        ("POST", "/token", GenerationMode.POSITIVE),
    ],
)
def test_every_response_is_in_the_description(described, method, path, mode, number):
    @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def check(case):
        # A deadline that nobody can keep is a 504, which counts as a fault of the server.
        case.headers = {name: value for name, value in (case.headers or {}).items() if not is_short(name, value)}
        case.call_and_validate(excluded_checks=UNKNOWING, timeout=120)

    check()
