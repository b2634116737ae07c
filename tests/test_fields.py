"""Every field of every request schema: it works, it has no effect and the README says so, or it is refused by name."""

import json
import re
from pathlib import Path

import pytest

from pipelines.checks import Checks
from schemas.contract import check_body, known_fields
from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.requests import Answered, Request
from schemas.rules import Judge

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MODEL = "smollm2-135m-instruct"
LIMITS = ModelLimits((MODEL,), 8192, 49152, 20, 128, 32, chat_template="{% for m in messages %}{{ m }}{% endfor %}")
TOOLS_LIMITS = ModelLimits((MODEL,), 8192, 49152, 20, 128, 32, chat_template="{{ tools }}", tool_parser="hermes")

PROMPT = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
MESSAGES = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "temperature": 0,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANY_TEXT = {"prompt": "Once", "max_tokens": 6, "temperature": 1, "seed": 7}
# Token ids of the embedded model.
PARIS, ROME, BEGIN, END = 7042, 7268, 1, 2
# Of two words it says one time and again.
LOOP = {"allowed_token_ids": [PARIS, ROME], "max_tokens": 8}


def text(body, index=0):
    choice = body["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def choice(body):
    return body["choices"][0]


# What a field does to a completion: what to send, and what must hold of the answer.
WORKS = {
    "model": [({"model": MODEL}, lambda a: a["model"] == MODEL)],
    "prompt": [
        ({"prompt": "The capital of Italy is"}, lambda a: text(a).startswith(" Rome")),
        ({"prompt": ["The capital of Italy is"] * 2}, lambda a: text(a, 1).startswith(" Rome")),
        ({"prompt": [[504, 3575, 282, 4649, 314], [504]]}, lambda a: text(a).startswith(" Paris")),
    ],
    "max_tokens": [({"max_tokens": 3, "ignore_eos": True}, lambda a: a["usage"]["completion_tokens"] == 3)],
    "temperature": [({"temperature": 0}, lambda a: text(a).startswith(" Paris"))],
    "echo": [({"echo": True}, lambda a: text(a).startswith("The capital of France is"))],
    "frequency_penalty": [({**LOOP, "frequency_penalty": 2}, lambda a: " Rome" in text(a))],
    "presence_penalty": [
        ({**LOOP, "logit_bias": {str(ROME): 4.5}, "presence_penalty": 2, "max_tokens": 2},
         lambda a: text(a) == " Paris Rome"),
    ],
    "repetition_penalty": [({**LOOP, "repetition_penalty": 1.5}, lambda a: " Rome" in text(a))],
    "logit_bias": [({"logit_bias": {str(ROME): 100}, "max_tokens": 1}, lambda a: text(a) == " Rome")],
    "logprobs": [({"logprobs": 2}, lambda a: len(choice(a)["logprobs"]["top_logprobs"][0]) >= 2)],
    "n": [({**ANY_TEXT, "n": 2}, lambda a: len(a["choices"]) == 2)],
    "seed": [({**ANY_TEXT}, lambda a: bool(text(a)))],
    "stop": [({"stop": "."}, lambda a: "." not in text(a) and choice(a)["finish_reason"] == "stop")],
    "stop_token_ids": [({"stop_token_ids": [PARIS]}, lambda a: choice(a)["finish_reason"] == "stop")],
    "include_stop_str_in_output": [
        ({"stop": ".", "include_stop_str_in_output": True}, lambda a: text(a).endswith(".")),
    ],
    "top_p": [({**ANY_TEXT, **PROMPT, "temperature": 2, "top_p": 1e-6}, lambda a: text(a).startswith(" Paris"))],
    "top_k": [({**ANY_TEXT, **PROMPT, "temperature": 2, "top_k": 1}, lambda a: text(a).startswith(" Paris"))],
    "min_p": [({**ANY_TEXT, **PROMPT, "temperature": 2, "min_p": 1}, lambda a: text(a).startswith(" Paris"))],
    "ignore_eos": [
        ({"allowed_token_ids": [END], "max_tokens": 4, "ignore_eos": True},
         lambda a: a["usage"]["completion_tokens"] == 4),
    ],
    "min_tokens": [({"stop": ".", "min_tokens": 5}, lambda a: a["usage"]["completion_tokens"] >= 5)],
    "skip_special_tokens": [
        ({"allowed_token_ids": [BEGIN], "max_tokens": 2, "skip_special_tokens": False},
         lambda a: text(a) == "<|im_start|>" * 2),
    ],
    "spaces_between_special_tokens": [({"spaces_between_special_tokens": False}, lambda a: bool(text(a)))],
    "truncate_prompt_tokens": [({"truncate_prompt_tokens": 2}, lambda a: a["usage"]["prompt_tokens"] == 2)],
    "truncation_side": [
        ({"truncate_prompt_tokens": 2, "truncation_side": "right", "return_token_ids": True},
         lambda a: choice(a)["prompt_token_ids"] == [504, 3575]),
    ],
    "allowed_token_ids": [({"allowed_token_ids": [ROME], "max_tokens": 2}, lambda a: text(a) == " Rome Rome")],
    "bad_words": [({"bad_words": ["Paris"]}, lambda a: "Paris" not in text(a))],
    "prompt_logprobs": [({"prompt_logprobs": 1}, lambda a: len(choice(a)["prompt_logprobs"]) == 5)],
    "logprob_token_ids": [
        ({"logprobs": 1, "logprob_token_ids": [PARIS, ROME], "max_tokens": 1},
         lambda a: {" Paris", " Rome"} <= set(choice(a)["logprobs"]["top_logprobs"][0])),
    ],
    "add_special_tokens": [({"add_special_tokens": False}, lambda a: a["usage"]["prompt_tokens"] == 5)],
    "response_format": [
        ({"response_format": {"type": "json_object"}, "max_tokens": 40}, lambda a: text(a).lstrip().startswith("{")),
    ],
    "structured_outputs": [({"structured_outputs": {"choice": ["no", "nono"]}}, lambda a: text(a) in {"no", "nono"})],
    "priority": [({"priority": -5}, lambda a: bool(text(a)))],
    "request_id": [({"request_id": "mine"}, lambda a: "mine" in a["id"])],
    "return_tokens_as_token_ids": [
        ({"logprobs": 1, "return_tokens_as_token_ids": True},
         lambda a: choice(a)["logprobs"]["tokens"][0] == f"token_id:{PARIS}"),
    ],
    "return_token_ids": [
        ({"return_token_ids": True},
         lambda a: choice(a)["token_ids"][0] == PARIS and len(choice(a)["prompt_token_ids"]) == 5),
    ],
    "cache_salt": [({"cache_salt": "salt"}, lambda a: text(a).startswith(" Paris"))],
    "repetition_detection": [
        ({"allowed_token_ids": [ROME], "max_tokens": 60,
          "repetition_detection": {"max_pattern_size": 2, "min_count": 4}},
         lambda a: a["usage"]["completion_tokens"] == 4),
    ],
    "use_beam_search": [({"use_beam_search": True, "n": 2}, lambda a: len(a["choices"]) == 2)],
    "length_penalty": [({"use_beam_search": True, "n": 2, "length_penalty": 0.5}, lambda a: bool(text(a)))],
}  # fmt: skip

# What a field does to a chat's answer.
CHAT_WORKS = {
    "messages": [({}, lambda a: "Paris" in text(a))],
    "max_completion_tokens": [({"max_completion_tokens": 2}, lambda a: a["usage"]["completion_tokens"] == 2)],
    "logprobs": [({"logprobs": True}, lambda a: len(choice(a)["logprobs"]["content"]) > 0)],
    "top_logprobs": [
        ({"logprobs": True, "top_logprobs": 2},
         lambda a: len(choice(a)["logprobs"]["content"][0]["top_logprobs"]) == 2),
    ],
    "echo": [
        ({"messages": [*MESSAGES["messages"], {"role": "assistant", "content": "The capital"}], "echo": True,
          "continue_final_message": True, "add_generation_prompt": False},
         lambda a: text(a).startswith("The capital")),
    ],
    "continue_final_message": [
        ({"messages": [*MESSAGES["messages"], {"role": "assistant", "content": "The capital of France is"}],
          "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 2},
         lambda a: "Paris" in text(a)),
    ],
    "add_generation_prompt": [({"add_generation_prompt": False}, lambda a: text(a) is not None)],
    "response_format": [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["Rome"]}}}},
         lambda a: json.loads(text(a)) == "Rome"),
    ],
    "guided_json": [({"guided_json": {"enum": ["Rome"]}}, lambda a: json.loads(text(a)) == "Rome")],
    "guided_regex": [({"guided_regex": "R[o]me"}, lambda a: text(a) == "Rome")],
    "guided_choice": [({"guided_choice": ["no", "nono"]}, lambda a: text(a) in {"no", "nono"})],
    "guided_grammar": [({"guided_grammar": 'root ::= "Rome"'}, lambda a: text(a) == "Rome")],
    "structural_tag": [
        ({"structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "Rome"}}'},
         lambda a: text(a) == "Rome"),
    ],
    "guided_decoding_backend": [({"guided_decoding_backend": "xgrammar"}, lambda a: "Paris" in text(a))],
    "chat_template_kwargs": [({"chat_template_kwargs": {"a": 1}}, lambda a: "Paris" in text(a))],
    "timeout_sec": [({"timeout_sec": 60}, lambda a: "Paris" in text(a))],
}  # fmt: skip

# Works, in a way that this model's single answer doesn't show.
UNSEEN = {
    "model": "there is one served model",
    "prompt": "there is no answer without it",
    "messages": "there is no answer without them",
    "temperature": "without it an answer is drawn by chance, and may be the same",
    "seed": "seen by two equal answers, in tests/test_engine.py",
    "add_special_tokens": "the model's tokenizer adds none",
    "spaces_between_special_tokens": "the model's special tokens stand apart already",
    "priority": "an order, not an answer; seen in tests/test_admission.py",
    "cache_salt": "seen by what the cache had, below",
    "length_penalty": "orders beams; seen in tests/test_beams.py",
    "add_generation_prompt": "either way the model goes on",
    "chat_template_kwargs": "the model's template takes none",
    "guided_decoding_backend": "there is one",
    "timeout_sec": "seen by a request that is late, below",
}

# Accepted, and nothing changes; the README says why.
NO_EFFECT = {
    "user": "u",
    "session_id": "s",
    "stream": False,
    "stream_interval": 4,
    "mm_payload": "none",
    "return_mm_kwargs": False,
    "parallel_tool_calls": True,
}

_TOO_MANY = "too_many_logprobs"
REFUSED = {
    "model": [("gpt-17", "unknown_model")],
    "prompt": [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([[]], "empty_prompt"),
        ([""], "empty_prompt"),
        (["ok", ""], "empty_prompt"),
        (None, "empty_prompt"),
        ([49152], "token_out_of_vocabulary"),
        ([[1], [10**30]], "token_out_of_vocabulary"),
        (["a"] * 1025, "too_many_prompts"),
    ],
    "max_tokens": [(0, "out_of_range"), (-1, "out_of_range"), (10**30, "out_of_range")],
    "min_tokens": [(-1, "out_of_range"), (7, "out_of_range"), (2**63, "out_of_range")],
    "temperature": [(-0.1, "out_of_range"), (2.1, "out_of_range")],
    "top_p": [(0, "out_of_range"), (1.1, "out_of_range")],
    "top_k": [(-2, "out_of_range"), (2**63, "out_of_range")],
    "min_p": [(-0.1, "out_of_range"), (1.5, "out_of_range")],
    "frequency_penalty": [(3, "out_of_range")],
    "presence_penalty": [(-3, "out_of_range")],
    "repetition_penalty": [(0, "out_of_range"), (-1, "out_of_range")],
    "n": [(0, "out_of_range"), (129, "too_many_choices"), (2, "choices_need_sampling"), (10**400, "too_many_choices")],
    "logprobs": [(-2, "out_of_range"), (21, _TOO_MANY), (-1, _TOO_MANY)],
    "prompt_logprobs": [(-2, "out_of_range"), (21, _TOO_MANY), (-1, _TOO_MANY)],
    "logprob_token_ids": [([1], "logprobs_missing")],
    "seed": [(2**63, "out_of_range")],
    "priority": [(2**63, "out_of_range")],
    "stop": [("", "empty_text"), (["a", ""], "empty_text")],
    "bad_words": [([""], "empty_text")],
    "stop_token_ids": [([-1], "token_out_of_vocabulary"), ([10**400], "token_out_of_vocabulary")],
    "allowed_token_ids": [([], "out_of_range"), ([49152], "token_out_of_vocabulary")],
    "logit_bias": [
        ({"x": 1}, "token_out_of_vocabulary"),
        ({"-1": 1}, "token_out_of_vocabulary"),
        ({"49152": 1}, "token_out_of_vocabulary"),
        ({"9" * 400: 1}, "token_out_of_vocabulary"),
        ({"²": 1}, "token_out_of_vocabulary"),
    ],
    "truncate_prompt_tokens": [(0, "empty_prompt"), (8193, "out_of_range"), (2**63, "out_of_range")],
    "stream": [(True, "stream_in_batch")],
    "stream_options": [({"include_usage": True}, "stream_in_batch")],
    "suffix": [("b", "unsupported_field")],
    "watermarking": [(True, "unsupported_field")],
    "thinking_token_budget": [(0, "unsupported_field"), (5, "unsupported_field")],
    "routed_experts_prompt_start": [(1, "unsupported_field")],
    "return_token_offsets": [(True, "unsupported_field")],
    "kv_transfer_params": [({"a": 1}, "unsupported_field")],
    "ec_transfer_params": [({"a": 1}, "unsupported_field")],
    "vllm_xargs": [({"a": 1}, "unsupported_field")],
    "prompt_embeds": [("AAAA", "feature_off")],
    "repetition_detection": [
        ({"max_pattern_size": -1}, "out_of_range"),
        ({"max_pattern_size": 1, "min_pattern_size": 2}, "out_of_range"),
        ({"max_pattern_size": 2, "min_count": 1}, "out_of_range"),
    ],
    "response_format": [
        ({"type": "json_schema"}, "bad_constraint"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "bad_constraint"),
    ],
    "structured_outputs": [
        ({}, "bad_constraint"),
        ({"json": {}, "regex": "a"}, "bad_constraint"),
        ({"choice": []}, "bad_constraint"),
        ({"grammar": ""}, "bad_constraint"),
        ({"json_object": False}, "bad_constraint"),
        ({"regex": "a", "_backend": "outlines"}, "bad_constraint"),
    ],
}

CHAT_REFUSED = {
    "messages": [
        ([], "empty_prompt"),
        ([{"role": "assistant"}], "empty_prompt"),
        ([{"role": "user", "content": "w"}, {"role": "function", "name": "f", "content": "ok"}], "tools_unsupported"),
        ([{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}], "tools_unsupported"),
        ([{"role": "assistant", "content": "a", "refusal": "no"}], "unsupported_field"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "media_unsupported"),
        ([{"role": "tool", "tool_call_id": "c", "content": "ok"}], "tools_unsupported"),
    ],
    "max_completion_tokens": [(0, "out_of_range")],
    "top_logprobs": [(2, "logprobs_missing"), (-2, "out_of_range")],
    "tools": [([], "bad_tools"), ([TOOL], "tools_unsupported")],
    "tool_choice": [("required", "bad_tools")],
    "documents": [([{"text": "a"}], "unsupported_field")],
    "continue_final_message": [(True, "bad_continuation")],
    "timeout_sec": [(0, "out_of_range")],
    "chat_template": [("{{ 1 }}", "feature_off")],
    "chat_template_kwargs": [({"chat_template": "x"}, "feature_off")],
    "mm_processor_kwargs": [({"a": 1}, "unsupported_field")],
    "logits_processors": [(["a"], "unsupported_field")],
    "best_of": [(2, "retired_field")],
    "guided_json": [("", "bad_constraint")],
    "guided_choice": [([], "bad_constraint")],
    "guided_decoding_backend": [("outlines", "unsupported_field")],
    "guided_whitespace_pattern": [("a", "unsupported_field")],
    "guided_meta": [({"a": 1}, "unsupported_field")],
}


def refusal(body, endpoint=COMPLETIONS, limits=LIMITS):
    return check_body(json.loads(json.dumps(body)), endpoint, Judge("batch", limits))


@pytest.mark.parametrize(("field", "value", "reason"), [(f, v, r) for f, cases in REFUSED.items() for v, r in cases])
def test_a_value_that_cannot_work_is_refused_by_name(field, value, reason):
    failure = refusal({**PROMPT, field: value})
    assert failure is not None and failure.reason == reason
    assert failure.param.startswith(field) and failure.message.startswith(failure.param)
    assert failure.status_code == (404 if reason == "unknown_model" else 400) and len(failure.message) < 400


@pytest.mark.parametrize(
    ("field", "value", "reason"), [(f, v, r) for f, cases in CHAT_REFUSED.items() for v, r in cases]
)
def test_a_chats_value_that_cannot_work_is_refused_by_name(field, value, reason):
    failure = refusal({**MESSAGES, field: value}, CHATS)
    assert failure is not None and failure.reason == reason and failure.param.startswith(field)


def test_prompts_logprobs_and_lengths_at_their_bounds_pass():
    for fragment in (
        {"prompt": [49151]},
        {"prompt": [8.0, 9.0]},
        {"logprobs": 20},
        {"seed": 2**63 - 1, "priority": -(2**63)},
        {"echo": True, "max_tokens": 0},
        {"n": 128, "temperature": 1},
        {"thinking_token_budget": -1},
        {"kv_transfer_params": {}, "suffix": None, "vllm_xargs": None},
        {"structured_outputs": {"regex": ""}},
        {"truncate_prompt_tokens": -1},
    ):
        assert refusal({**PROMPT, **fragment}) is None, fragment


def test_tools_pass_where_the_template_knows_them():
    for fragment in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}):
        assert refusal({**MESSAGES, **fragment}, CHATS, TOOLS_LIMITS) is None
    named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}
    assert refusal({**MESSAGES, **named}, CHATS, TOOLS_LIMITS).param == "tool_choice.function.name"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    failure = refusal({"messages": [{"role": "assistant", "tool_calls": [call]}]}, CHATS, TOOLS_LIMITS)
    assert (failure.reason, failure.param) == ("bad_tools", "messages[0].tool_calls[0].function.arguments")


def test_calls_of_tools_by_their_former_names_pass_where_the_template_knows_tools():
    former = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    told = {"role": "function", "name": "f", "content": "ok"}
    assert refusal({"messages": [former, told]}, CHATS, TOOLS_LIMITS) is None
    former["function_call"]["arguments"] = "{oops"
    assert refusal({"messages": [former]}, CHATS, TOOLS_LIMITS).param == "messages[0].function_call.arguments"


@pytest.mark.parametrize(
    "beside",
    [{"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}],
)
def test_a_chat_has_one_constraint_by_whichever_name(beside):
    failure = refusal({**MESSAGES, "guided_json": {}, **beside}, CHATS)
    assert (failure.reason, failure.param) == ("bad_constraint", "guided_json")


def test_a_stream_is_for_the_online_door_and_not_for_beams():
    def online(**fragment):
        return check_body({**PROMPT, **fragment}, COMPLETIONS, Judge("online", LIMITS))

    assert online(stream=True, stream_options={"include_usage": True}) is None
    assert online(stream_options={"include_usage": True}).reason == "stream_options_without_stream"
    assert online(stream=True, use_beam_search=True, n=2).reason == "beam_unsupported"


def test_a_model_without_a_template_cannot_chat():
    assert refusal(MESSAGES, CHATS, ModelLimits(("m",), 8, 8, 1, 1, 1)).reason == "no_chat_template"


def test_what_the_operator_allows_passes():
    allowed = ModelLimits((MODEL,), 8192, 49152, 20, 128, 32, "{{ x }}", allowed=frozenset({"chat_template"}))
    assert refusal({**MESSAGES, "chat_template": "{{ 1 }}"}, CHATS, allowed) is None


@pytest.mark.parametrize(
    ("endpoint", "tested"),
    [
        (COMPLETIONS, WORKS.keys() | REFUSED.keys() | NO_EFFECT.keys()),
        (CHATS, WORKS.keys() | REFUSED.keys() | CHAT_WORKS.keys() | CHAT_REFUSED.keys() | NO_EFFECT.keys()),
    ],
)
def test_every_field_of_the_schema_has_a_test(endpoint, tested):
    assert known_fields(endpoint) - tested == set()


def test_every_field_of_the_schema_stands_in_the_readmes_table():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    table = readme[readme.index("### Fields") : readme.index("### Legacy chats")]
    rows = [line for line in table.splitlines() if re.match(r"\| `", line) and line.count("|") == 5]
    named = {name for line in rows for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    fields = known_fields(COMPLETIONS) | known_fields(CHATS)
    assert fields - named == set(), "the README's table of fields lacks some"
    assert named - fields == set(), "the README's table has fields that no schema knows"


@pytest.fixture(scope="module")
def checks(engine):
    return Checks("batch", None, engine.limits)


def answer(engine, checks, endpoint, body):
    judged = checks.check(body, endpoint)
    assert not isinstance(judged, Failure), judged
    event = engine.submit(Request("field", endpoint, json.dumps(body)), lane="batch").result(timeout=300)
    assert isinstance(event, Answered), event
    # What was counted before the engine is what the engine counts.
    assert event.usage["prompt_tokens"] == judged.num_tokens, body
    return event.body


def holds_without(engine, checks, endpoint, body, field, holds):
    """Whether what a field is to do is seen without it, too: then nothing is proven."""
    body = {name: value for name, value in body.items() if name != field}
    if isinstance(checks.check(body, endpoint), Failure):
        return False
    found = answer(engine, checks, endpoint, body)
    try:
        return holds(found)
    except (TypeError, json.JSONDecodeError):  # what is looked at isn't there
        return False


@pytest.mark.engine
@pytest.mark.parametrize("field", WORKS)
def test_a_field_does_what_it_says(engine, checks, field):
    for fragment, holds in WORKS[field]:
        with_it = {**PROMPT, **fragment}
        body = answer(engine, checks, COMPLETIONS, with_it)
        assert holds(body), body
        if field not in UNSEEN:
            assert not holds_without(engine, checks, COMPLETIONS, with_it, field, holds)


@pytest.mark.engine
@pytest.mark.parametrize("field", CHAT_WORKS)
def test_a_chats_field_does_what_it_says(engine, checks, field):
    for fragment, holds in CHAT_WORKS[field]:
        with_it = {**MESSAGES, **fragment}
        body = answer(engine, checks, CHATS, with_it)
        assert holds(body), body
        if field not in UNSEEN:
            assert not holds_without(engine, checks, CHATS, with_it, field, holds)


@pytest.mark.engine
@pytest.mark.parametrize(("endpoint", "body"), [(COMPLETIONS, PROMPT), (CHATS, MESSAGES)])
def test_a_field_without_effect_changes_no_answer(engine, checks, endpoint, body):
    texts = {
        text(answer(engine, checks, endpoint, {**body, field: value}))
        for field, value in NO_EFFECT.items()
        if field in known_fields(endpoint)
    }
    assert texts == {text(answer(engine, checks, endpoint, body))}


@pytest.mark.engine
def test_a_salt_keeps_cached_prefixes_apart(engine, checks):
    def cached(salt):
        body = {**PROMPT, "prompt": "a salted prompt, longer than a block: " + "one two " * 50, "cache_salt": salt}
        return answer(engine, checks, COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert not cached("first") and cached("first") > 0 and not cached("second")


@pytest.mark.engine
def test_a_chat_past_its_own_timeout_fails_as_such(engine):
    body = {**MESSAGES, "max_tokens": 4000, "ignore_eos": True, "timeout_sec": 0.5}
    event = engine.submit(Request("late", CHATS, json.dumps(body)), lane="batch").result(timeout=60)
    assert event.failure.reason == "deadline_exceeded"
