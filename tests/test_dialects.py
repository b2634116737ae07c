"""Other APIs' words for a chat, and ours for its answer."""

import json

import pytest

from schemas.contract import check_body
from schemas.dialects import EXTERNAL_CHAT, LEGACY, LEGACY_STREAM, in_words_of, to_engine
from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.replies import choices_of, reply_to
from schemas.requests import Timing
from schemas.rules import Judge

CHATS = "/v1/chat/completions"
TIMING = Timing(1.0, 2.0, 3.25)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def limits(template="{{ messages }} {{ tools }}", **others):
    return ModelLimits(("m",), 8192, 49152, 20, 128, 32, chat_template=template, **others)


def turns(*pairs, **body):
    context = [{"type": kind, "text": text} for kind, text in pairs]
    return to_engine({"context": context, **body}, LEGACY, limits())["messages"]


def test_each_kind_of_turn_has_its_place():
    assert turns(
        ("Instruction", "Be kind."),
        ("Role", "A nurse"),
        ("Human", "Hello"),
        ("AI", "Yes?"),
        ("AI (internally)", "They are shy."),
        ("Retrieval", "Dogs bark."),
        ("LinkedWebpages", "dogs.example: woof"),
        ("Metadata", "It is noon."),
        ("Question", "What do dogs do?"),
        ("Options", "bark, fly"),
        ("Answer", "bark"),
        ("System", "Be brief."),
    ) == [
        {"role": "system", "content": "Be kind.\n\nYour role:\nA nurse"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes?"},
        {
            "role": "user",
            "content": "A note that the assistant made for itself and has not said:\nThey are shy.\n\n"
            "Retrieved for this conversation:\nDogs bark.\n\nFrom linked web pages:\ndogs.example: woof\n\n"
            "About this conversation:\nIt is noon.\n\nWhat do dogs do?\n\nOptions:\nbark, fly",
        },
        {"role": "assistant", "content": "bark"},
        {"role": "system", "content": "Be brief."},
    ]


def test_what_is_known_of_the_user_stands_in_the_system_message():
    about = {"user_firstname": "Ada", "user_timezone": "Europe/London", "user_city": None}
    told = "About the user:\nfirst name: Ada, time zone: Europe/London"
    assert turns(("Human", "hi"), metadata=about) == [{"role": "system", "content": told}, USER]
    assert turns(("System", "Be kind."), ("Human", "hi"), metadata=about)[0]["content"] == f"Be kind.\n\n{told}"


def test_tools_and_their_answers_keep_their_calls():
    context = [
        {"type": "Human", "text": "weather?"},
        {"type": "AI", "text": "", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        {"type": "Tool", "text": "sunny"},
        {"type": "Tool", "text": "windy", "tool_call_id": "c2"},
    ]
    messages = to_engine({"context": context}, LEGACY, limits())["messages"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert [message["tool_call_id"] for message in messages[2:]] == ["c1", "c2"]


def test_a_call_belongs_to_what_the_assistant_said_before_it():
    context = [
        {"type": "AI", "text": "I'll look."},
        {"type": "AI", "text": "", "tool_calls": [CALL]},
        {"type": "AI", "text": "And then?"},
    ]
    called, after = to_engine({"context": context}, LEGACY, limits())["messages"]
    assert called["content"] == "I'll look." and len(called["tool_calls"]) == 1
    # What follows a call isn't part of it.
    assert after["content"] == "And then?" and "tool_calls" not in after


def test_a_legacy_body_says_what_a_chat_says():
    body = {"context": [{"type": "Human", "text": "hi"}], "config": "m", "stop_tokens": ["."], "max_tokens": 5}
    body |= {"temperature": 0, "top_p": 0.5, "tools": [], "web_search": False, "server_target": "x", "stream": True}
    said = json.dumps(body)
    chat = to_engine(body, LEGACY, limits())
    assert chat == {
        "messages": [USER],
        "model": "m",
        "stop": ["."],
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
    }
    assert json.dumps(body) == said
    streamed = to_engine({**body, "config": "placeholder"}, LEGACY_STREAM, limits())
    assert streamed["stream"] is True and "model" not in streamed


def test_each_path_has_its_own_defaults():
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [USER], "tools": [tool]}
    assert to_engine(body, CHATS, limits()) == body
    external = to_engine(body, EXTERNAL_CHAT, limits())
    assert external["tool_choice"] == "none" and external["parallel_tool_calls"] is False
    # Where nobody asks for a call, nobody needs to know how the model writes one.
    assert check_body(body, EXTERNAL_CHAT, Judge("online", limits())) is None
    assert check_body(body, CHATS, Judge("online", limits())).reason == "tools_unsupported"


def test_a_stream_with_options_tells_its_usage_unless_they_say_otherwise():
    for options, is_told in (({}, True), ({"include_usage": None}, True), ({"include_usage": False}, False)):
        asked = to_engine({"messages": [USER], "stream": True, "stream_options": options}, CHATS, limits())
        assert asked["stream_options"]["include_usage"] is is_told
    assert "stream_options" not in to_engine({"messages": [USER], "stream": True}, CHATS, limits())


def test_former_names_become_those_of_today():
    body = {"messages": [USER], "guided_choice": ["a"], "guided_decoding_backend": "auto", "guided_meta": {}}
    assert to_engine(body, CHATS, limits()) == {"messages": [USER], "structured_outputs": {"choice": ["a"]}}
    messages = [{"role": "developer", "content": "Be kind."}, USER]
    former = [
        {"role": "assistant", "function_call": CALL["function"]},
        {"role": "function", "name": "f", "content": "1"},
    ]
    told = to_engine({"messages": messages + former}, CHATS, limits())["messages"]
    assert told[0] == {"role": "system", "content": "Be kind."}
    assert told[2] == {"role": "assistant", "tool_calls": [{**CALL, "id": "call_2"}]}
    assert told[3] == {"role": "tool", "tool_call_id": "call_2", "content": "1"}
    assert to_engine({"messages": messages}, CHATS, limits("{{ developer }}"))["messages"] == messages


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"context": []}, "context", "empty_prompt"),
        ({"context": [{"type": "Robot", "text": "a"}]}, "context[0].type", "schema"),
        ({"context": [{"type": "Human", "text": "a"}], "config": "Pi"}, "config", "unknown_model"),
        ({"context": [{"type": "Human", "text": "a"}], "stop_tokens": [""]}, "stop_tokens[0]", "empty_text"),
        ({"context": [{"type": "Human", "text": "a"}], "temperature": 3}, "temperature", "out_of_range"),
        ({"context": [{"type": "Human", "text": "a"}], "max_tokens": 0}, "max_tokens", "out_of_range"),
        ({"context": [{"type": "Human", "text": "a"}], "schemas": ["a"]}, "schemas", "unsupported_field"),
        (
            {"context": [{"type": "Human", "text": "a", "tool_calls": [CALL]}]},
            "context[0].tool_calls",
            "unsupported_field",
        ),
        (
            {"context": [{"type": "Human", "text": "a"}], "tools": [{"function": {"name": "f"}}]},
            "tools",
            "tools_unsupported",
        ),
    ],
)
def test_a_legacy_body_is_refused_in_its_own_words(body, param, reason):
    for endpoint in (LEGACY, LEGACY_STREAM):
        failure = check_body(body, endpoint, Judge("online", limits()))
        assert (failure.param, failure.reason) == (param, reason)
        assert failure.message.startswith(f"{param}: ")


def test_what_the_engine_says_is_told_in_the_bodys_words():
    failure = Failure(400, "prompt_too_long", "messages: found 9,000 tokens", "messages")
    told = in_words_of(failure, {"context": []}, LEGACY)
    assert (told.param, told.message) == ("context", "context: found 9,000 tokens")
    assert in_words_of(failure, {"messages": []}, CHATS) is failure
    failure = Failure(400, "bad_constraint", "structured_outputs: it doesn't compile", "structured_outputs")
    assert in_words_of(failure, {"guided_json": {}}, CHATS).param == "guided_json"


def chat_answer(**message):
    message = {"role": "assistant", "content": "Hi.", "reasoning": None, "tool_calls": [], **message}
    return {"id": "a", "created": 5, "model": "m", "choices": [{"index": 0, "message": message}], "usage": {}}


def test_an_answer_is_told_in_the_words_of_its_api():
    told = reply_to(CHATS).answer(chat_answer(reasoning="Hm."), TIMING)
    assert told["choices"][0]["message"]["reasoning_content"] == "Hm." and "time_info" not in told
    told = reply_to(EXTERNAL_CHAT).answer(chat_answer(), TIMING)
    assert told["time_info"] == {"queue_ms": 1.0, "first_token_ms": 2.0, "total_ms": 3.25}
    assert reply_to(LEGACY).answer(chat_answer(), TIMING) == {"created": 5, "text": "Hi."}
    told = reply_to(LEGACY).answer(chat_answer(content=None, tool_calls=[CALL], reasoning="Hm."), TIMING)
    assert told == {"created": 5, "text": "", "tool_calls": [CALL], "reasoning_content": "Hm."}


def test_the_choices_of_an_answer_are_found_in_whichever_words():
    assert choices_of(chat_answer()) == chat_answer()["choices"]
    told = reply_to(LEGACY).answer(chat_answer(content=None, tool_calls=[CALL], reasoning="Hm."), TIMING)
    message = {"content": None, "tool_calls": [CALL], "reasoning_content": "Hm."}
    assert choices_of(told) == [{"message": message}]


def events(endpoint, *chunks):
    """What goes out for chunks of the engine."""
    reply = reply_to(endpoint)
    sent = []
    for chunk in chunks:
        is_concerned = reply.concerns(json.dumps(chunk, separators=(",", ":")))
        if (told := reply.chunk(chunk) if is_concerned else chunk) is not None:
            sent.append(told)
    return sent + list(reply.last(TIMING))


def delta(**delta):
    return {"created": 5, "choices": [{"index": 0, "delta": delta}]}


def test_a_stream_is_told_in_the_words_of_its_api():
    usage = {"created": 5, "choices": [], "usage": {"total_tokens": 3}}
    sent = events(CHATS, delta(role="assistant", content=""), delta(reasoning="Hm."), delta(content="Hi."), usage)
    assert sent[1]["choices"][0]["delta"] == {"reasoning_content": "Hm."} and sent[-1] == usage
    sent = events(EXTERNAL_CHAT, delta(content="Hi."), {**usage})
    assert sent[-1] == {**usage, "time_info": {"queue_ms": 1.0, "first_token_ms": 2.0, "total_ms": 3.25}}
    assert events(EXTERNAL_CHAT, delta(content="Hi."))[-1] == delta(content="Hi.")


def test_a_legacy_stream_counts_its_events_and_tells_calls_whole():
    usage = {"created": 5, "choices": [], "usage": {"total_tokens": 3}}
    sent = events(LEGACY_STREAM, delta(role="assistant", content=""), delta(content="Hi"), delta(content="!"), usage)
    assert sent == [
        {"created": 5, "idx": 0, "text": "Hi", "tool_calls": None},
        {"created": 5, "idx": 1, "text": "!", "tool_calls": None},
    ]
    begin = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": text}} for text in ("{", "}")]
    sent = events(LEGACY_STREAM, *(delta(tool_calls=[part]) for part in (begin, *pieces)), usage)
    assert sent == [{"created": 5, "idx": 0, "text": "", "tool_calls": [CALL]}]
    assert [event["text"] for event in events(LEGACY_STREAM, usage)] == [""]
