"""What a beam search honours of the other fields passes beside it, and what it doesn't is refused by name."""

import pytest

from tests.test_fields import CHATS, MESSAGES, PROMPT, TOOL, TOOLS_LIMITS, refusal

# What a beam search doesn't honour is refused beside it.
BESIDE_BEAMS = {
    "repetition_penalty": 1.5,
    "presence_penalty": -1,
    "frequency_penalty": -1,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "logit_bias": {"1": 1},
    "allowed_token_ids": list(range(129)),
    "bad_words": ["a"] * 257,
    "structured_outputs": {"regex": "a"},
    "response_format": {"type": "json_object"},
    "repetition_detection": {"max_pattern_size": 1, "min_count": 2},
}

# What it does honour passes; tests/test_beams.py shows that it is.
WITH_BEAMS = [
    {"stop": "x", "include_stop_str_in_output": True},
    {"stop_token_ids": [1], "min_tokens": 2, "ignore_eos": True},
    {"presence_penalty": 1, "frequency_penalty": 2, "max_tokens": 512},
    {"logit_bias": {"1": -100}, "bad_words": ["a"], "seed": 1},
    {"allowed_token_ids": [1]},
    {"echo": True, "logprobs": 2, "prompt_logprobs": 1},
    {"priority": -5, "length_penalty": 0.5},
    {"length_penalty": -16},
]


@pytest.mark.parametrize(("field", "value"), BESIDE_BEAMS.items())
def test_a_field_that_beams_do_not_honour_is_refused_beside_them(field, value):
    failure = refusal({**PROMPT, "use_beam_search": True, "n": 2, field: value})
    assert failure is not None and (failure.reason, failure.param.partition(".")[0]) == ("beam_unsupported", field)
    assert refusal({**PROMPT, field: value}) is None


@pytest.mark.parametrize("fragment", WITH_BEAMS)
def test_a_field_that_beams_honour_passes_beside_them(fragment):
    assert refusal({**PROMPT, "use_beam_search": True, "n": 2, **fragment}) is None


def test_tools_are_refused_beside_beams():
    body = {**MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    assert refusal(body, CHATS, TOOLS_LIMITS) is None
    failure = refusal({**body, "use_beam_search": True, "n": 2}, CHATS, TOOLS_LIMITS)
    assert failure is not None and (failure.reason, failure.param) == ("beam_unsupported", "tools")


@pytest.mark.parametrize(
    ("fragment", "param"),
    [
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"length_penalty": 1000}, "length_penalty"),
        ({"length_penalty": -16.5}, "length_penalty"),
        ({"presence_penalty": 1, "max_tokens": 513}, "max_tokens"),
        ({"allowed_token_ids": [1], "logprobs": 1}, "logprobs"),
        ({"min_tokens": 2, "stop_token_ids": list(range(513))}, "stop_token_ids"),
        ({"logit_bias": {str(token): -1 for token in range(500)}, "bad_words": ["a"] * 7}, "logit_bias"),
    ],
)
def test_what_beams_honour_within_bounds_is_refused_outside_them(fragment, param):
    failure = refusal({**PROMPT, "use_beam_search": True, "n": 2, **fragment})
    assert (failure.reason, failure.param) == ("beam_unsupported", param)


def test_penalised_beams_of_a_chat_need_a_length():
    body = {**MESSAGES, "max_tokens": None, "use_beam_search": True, "frequency_penalty": 1}
    assert refusal(body, CHATS).param == "max_tokens"
    assert refusal({**body, "max_completion_tokens": 8}, CHATS) is None


def test_beams_have_a_width():
    assert refusal({**PROMPT, "use_beam_search": True, "n": 32}) is None
    assert refusal({**PROMPT, "use_beam_search": True, "n": 33}).reason == "too_many_choices"
