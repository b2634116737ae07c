"""The fingerprint: equal for requests whose answers must be, and for no others."""

import pytest

from schemas.fingerprint import fingerprint, is_deterministic

BODY = {"prompt": "a", "temperature": 0, "max_tokens": 8}
OURS = ("/v1/completions", "model-1")


@pytest.mark.parametrize(
    "same",
    [
        {"max_tokens": 8, "temperature": 0, "prompt": "a"},
        {**BODY, "request_id": "x", "user": "u", "session_id": "s", "priority": -3, "model": "any"},
        {**BODY, "stream": True, "stream_options": {"include_usage": True}, "stream_interval": 2},
        {**BODY, "seed": None, "stop": None},
    ],
)
def test_what_cannot_change_the_answer_is_left_out(same):
    assert fingerprint(same, *OURS) == fingerprint(BODY, *OURS)


@pytest.mark.parametrize(
    ("body", "endpoint", "identity"),
    [
        ({**BODY, "prompt": "b"}, *OURS),
        ({**BODY, "max_tokens": 9}, *OURS),
        ({**BODY, "cache_salt": "mine"}, *OURS),
        ({**BODY, "logit_bias": {"1": 2}}, *OURS),
        ({**BODY, "prompt": ["a"]}, *OURS),
        (BODY, "/v1/chat/completions", "model-1"),
        (BODY, "/v1/completions", "model-2"),
    ],
)
def test_what_can_is_not(body, endpoint, identity):
    assert fingerprint(body, endpoint, identity) != fingerprint(BODY, *OURS)


def test_a_lone_half_of_a_surrogate_pair_has_a_fingerprint_too():
    assert len(fingerprint({"prompt": "\ud800"}, *OURS)) == 32


@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        ({}, False),
        ({"temperature": None}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "n": 1}, True),
        ({"temperature": 0.7, "seed": 0}, True),
        ({"use_beam_search": True, "n": 4}, True),
    ],
)
def test_a_request_is_deterministic_when_it_is_greedy_or_seeded_or_a_search(body, is_one):
    assert is_deterministic(body) is is_one
