"""The contract: the JSON Schema decides, and a rejection says what was found and what was expected."""

import subprocess
import sys

import pytest

from schemas import generate
from schemas.completion import CompletionRequest
from schemas.contract import check_body, check_schema, parse_strict
from schemas.failures import Failure, UsageError
from schemas.settings import EngineSettings, parse_engine_settings

ENDPOINT = "/v1/completions"


@pytest.mark.parametrize("name", generate.MODELS)
def test_schema_files_are_those_of_the_models(name):
    assert (generate.HERE / name).read_text() == generate.render(name), "run: python -m schemas.generate"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", 'found "hot", expected number or null'),
        ({"max_tokens": "8"}, "max_tokens", 'found "8", expected integer or null'),
        ({"max_tokens": 8.5}, "max_tokens", "found 8.5, expected integer or null"),
        ({"n": None}, "n", "found null, expected integer"),
        ({"prompt": [1, -2]}, "prompt[1]", "found -2, which is less than the minimum of 0"),
        ({"prompt": [[1], [2, -4]]}, "prompt[1][1]", "found -4, which is less than the minimum of 0"),
        ({"prompt": {"a": 1}}, "prompt", 'found {"a":1}, expected array or string or null'),
        ({"stop": ["a"] * 5}, "stop", "which has more than 4 items"),
        ({"seed": 2**64}, "seed", "which is greater than the maximum of 9223372036854775808"),
        ({"truncation_side": "up"}, "truncation_side", 'which is not one of "left" or "right"'),
        ({"cache_salt": ""}, "cache_salt", 'found "", which is shorter than 1 character'),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", 'found "x", expected number'),
        ({"response_format": {"type": "xml"}}, "response_format.type", "which is not one of"),
        ([1], None, "the request: found [1], expected object"),
    ],
)
def test_a_breach_names_the_field_what_was_found_and_what_was_expected(body, param, words):
    failure = check_body(body, ENDPOINT)
    assert failure is not None
    assert (failure.status_code, failure.reason, failure.param) == (422, "schema", param)
    assert words in failure.message


def test_a_fault_in_a_body_says_where_in_words_of_its_writer():
    failure = parse_strict(b'{"prompt": "a",\n "n": }', "body")
    assert "(line 2, column 7)" in failure.message
    assert parse_strict(b"[1", "body").message.startswith("not valid JSON: the body ends inside the JSON value (")
    assert "send UTF-8" in parse_strict(b'"\xff"', "body").message
    assert parse_strict(b"[1e999]", "body").param == "[0]"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "some_future_field": {"any": ["thing"]}},
        {"prompt": ["a", "b"], "stop": None, "max_tokens": None, "seed": -(2**63)},
        {"prompt": [[1, 2], [3]], "logit_bias": {"7": -100}, "response_format": {"type": "text"}},
        {"prompt": [], "structured_outputs": {"choice": ["a", "b"], "_backend": None}},
    ],
)
def test_what_the_schema_allows_passes_and_is_carried_unchanged(body):
    assert check_schema(body, ENDPOINT) is None
    assert CompletionRequest.model_validate(body).model_dump(exclude_unset=True, by_alias=True) == body


def test_a_long_value_is_shortened_in_the_message():
    failure = check_body({"temperature": "x" * 10_000}, ENDPOINT)
    assert failure is not None and len(failure.message) < 200 and "10,002 characters" in failure.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"prompt": "a", "prompt": "b"}', 'the key "prompt" twice'),
        (b'{"temperature": NaN}', "(column 17)"),
        (b'{"a": {"b": [0, 1e999]}}', "a.b[1]: found a number beyond the range"),
        (b'{"temperature": -1' + b"0" * 400 + b".0}", "temperature: found a number beyond the range"),
        (b'{"prompt": "\xff\xfe"}', "no UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "a"', "ends inside the JSON value"),
        (b'{"prompt": "a"},', "more after the end"),
        (b"[" * 10_000, "nested too deep"),
        (b"hello", "found hello, expected a JSON object"),
    ],
)
def test_json_is_parsed_strictly(text, words):
    failure = parse_strict(text)
    assert isinstance(failure, Failure)
    assert (failure.status_code, failure.reason) == (400, "invalid_json")
    assert words in failure.message


def test_big_integers_stay_exact():
    assert parse_strict(b'{"seed": 18446744073709551617}') == {"seed": 18446744073709551617}


@pytest.mark.parametrize("field", ["stream", "stream_options"])
def test_a_batch_body_cannot_ask_for_a_stream(field):
    failure = check_body({"prompt": "a", field: True if field == "stream" else {"include_usage": True}}, ENDPOINT)
    assert failure is not None and (failure.reason, failure.param) == ("stream_in_batch", field)
    assert check_body({"prompt": "a", "stream": False}, ENDPOINT) is None


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("guided_json", {"type": "object"}, "write it as structured_outputs.json"),
        ("best_of", 3, "write it as n"),
        ("use_beamsearch", True, "write it as use_beam_search"),
        ("extra_body", {"priority": 1}, "write its fields beside the others"),
        ("guided_decoding_backend", "xgrammar", "leave it out"),
    ],
)
def test_a_field_that_does_nothing_any_more_is_refused_with_its_new_name(field, value, advice):
    failure = check_body({"prompt": "a", field: value}, ENDPOINT)
    assert failure is not None and (failure.status_code, failure.reason, failure.param) == (400, "retired_field", field)
    assert advice in failure.message
    assert check_body({"prompt": "a", field: None}, ENDPOINT) is None


def test_chat_bodies_have_a_schema_of_their_own():
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "user", "content": [{"type": "text", "text": "B"}]},
    ]
    assert check_body({"messages": messages}, "/v1/chat/completions") is None
    for body, param in (
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": [], "logprobs": 3}, "logprobs"),
        ({}, None),
    ):
        failure = check_body(body, "/v1/chat/completions")
        assert failure is not None and (failure.status_code, failure.param) == (422, param)


_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_engine_settings_come_from_pairs():
    assert parse_engine_settings(["max_num_seqs=64", "dtype=float32"]) == EngineSettings(
        max_num_seqs=64, dtype="float32"
    )


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("max_num_seqs", "expected FIELD=VALUE"),
        ("max_num_seq=1", "no such setting. There are: dtype"),
        ("max_num_seqs=0", "max_num_seqs=0: input should be greater than or equal to 1"),
        ("dtype=int3", "input should be 'auto'"),
    ],
)
def test_a_wrong_engine_setting_is_named_with_what_is_allowed(pair, words):
    with pytest.raises(UsageError, match=r"^--engine") as caught:
        parse_engine_settings([pair])
    assert words in str(caught.value)


def test_schemas_load_without_ray_torch_or_vllm():
    code = (
        "import sys, schemas.contract, schemas.settings, schemas.tables; "
        "print(*{'ray', 'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
