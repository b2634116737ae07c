"""Bodies that use every field of the request schemas, and ways to spoil them: what the drawn tests share."""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from schemas.requests import Endpoint

COMPLETIONS: Endpoint = "/v1/completions"
CHATS: Endpoint = "/v1/chat/completions"
LEGACY: Endpoint = "/external/api/inference"

_FUNCTION = {"name": "weather", "description": "of a place", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
_JSON_SCHEMA = {"name": "answer", "description": "one", "schema": {"type": "object"}, "strict": True}
_TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": {"type": "string"}, "end": "</a>"}],
    "triggers": ["<a>"],
}

# What completions and chats say alike.
_SHARED = {
    "model": "smollm2-135m-instruct",
    "logit_bias": {"7": -100, "49151": 1.5},
    "stream": False,
    "temperature": 0.7,
    "top_p": 0.9,
    "user": "u",
    "use_beam_search": False,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "length_penalty": 1.0,
    "stop_token_ids": [2, 3],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "prompt_logprobs": 1,
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["bad", "très mauvais"],
    "request_id": "r-1",
    "return_tokens_as_token_ids": True,
    "kv_transfer_params": {"any": ["thing"]},
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "max_tokens": 16,
    "n": 2,
    "seed": 42,
    "stop": ["\n", "END"],
    "stream_options": {"include_usage": True, "continuous_usage_stats": None},
    "truncate_prompt_tokens": 100,
    "add_special_tokens": False,
    "response_format": {"type": "json_schema", "json_schema": _JSON_SCHEMA},
    "echo": True,
    "priority": -5,
    "cache_salt": "salt",
    "vllm_xargs": {"a": "x", "b": 1, "c": 0.5},
}

# Valid by their schemas, each; together they use every field that a schema speaks of.
SEEDS: dict[Endpoint, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {
            **_SHARED,
            "prompt": "Once upon a time",
            "logprobs": 2,
            "suffix": "the end",
            "watermarking": False,
            "truncation_side": "left",
            "logprob_token_ids": [1, 2],
            "prompt_embeds": ["AAAA"],
            "structured_outputs": {
                "json": {"type": "object"},
                "regex": "[ab]+",
                "choice": ["a", "b"],
                "grammar": 'root ::= "a"',
                "json_object": True,
                "disable_any_whitespace": False,
                "disable_additional_properties": True,
                "whitespace_pattern": " *",
                "structural_tag": "{}",
                "_backend": "xgrammar",
                "_backend_was_auto": True,
            },
            "session_id": "s",
            "return_token_ids": True,
            "routed_experts_prompt_start": 0,
            "return_token_offsets": False,
            "mm_payload": "none",
            "return_mm_kwargs": None,
            "ec_transfer_params": {"a": {}},
            "vllm_xargs": {"a": ["x", 1, 0.5]},
            "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
            "thinking_token_budget": 10,
            "stream_interval": 2,
        },
        {"prompt": [1, 2, 3, 49151], "response_format": {"type": "structural_tag", "format": {"any": 1}}},
        {"prompt": ["one", "zwölf", "三"], "stop": "\n", "response_format": _TAGS},
        {"prompt": [[1, 2], [3], [4, 5, 6]], "prompt_embeds": "AAAA", "response_format": {"type": "text"}},
        {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": None, "logit_bias": None},
    ],
    CHATS: [
        {
            **_SHARED,
            "messages": [
                {"role": "developer", "content": "Be brief.", "name": "dev"},
                {"role": "user", "content": "Weather?"},
            ],
            "logprobs": True,
            "top_logprobs": 2,
            "max_completion_tokens": 20,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "best_of": 2,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "documents": [{"title": "a", "text": "b"}],
            "chat_template": "{{ messages }}",
            "chat_template_kwargs": {"thinking": True},
            "mm_processor_kwargs": {"num_crops": 4},
            "guided_json": {"type": "object"},
            "guided_regex": "a+",
            "guided_choice": ["a"],
            "guided_grammar": "root",
            "structural_tag": "{}",
            "guided_decoding_backend": "xgrammar",
            "guided_whitespace_pattern": " *",
            "guided_meta": {"a": 1},
            "logits_processors": ["a.b", {"qualname": "a.b", "args": [1, {}], "kwargs": {"c": None}}],
            "timeout_sec": 1.5,
        },
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "20 °C"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "no"}],
                    "refusal": "no",
                    "audio": {"id": "a1"},
                    "function_call": {"name": "f", "arguments": "{}"},
                    "tool_calls": [{"id": "c2", "type": "custom", "custom": {"name": "f", "input": "x"}}],
                },
                {"role": "function", "name": "f", "content": "old"},
                {"role": "critic", "content": ["a text", {"type": "text", "text": "b"}], "tool_calls": None},
            ],
            "response_format": _TAGS,
            "tool_choice": "auto",
            "stop": "\n",
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Look"},
                        {"type": "image_url", "image_url": {"url": "http://a/b.png", "detail": "low"}},
                        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                        {"type": "file", "file": {"file_data": "AAAA", "file_id": "f", "filename": "a.txt"}},
                    ],
                },
                {
                    "role": "watcher",
                    "content": [
                        {"type": "audio_url", "audio_url": {"url": "http://a/b.wav"}},
                        {"type": "video_url", "video_url": {"url": "http://a/b.mp4"}},
                        {"type": "image_embeds", "image_embeds": {"a": "AAAA"}},
                        {"image_url": "http://a"},
                        {"audio_url": "http://a"},
                        {"video_url": "http://a"},
                    ],
                },
            ],
            "seed": 4294967295,
        },
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0},
        {"messages": [{"role": "user", "content": "hi"}], "tool_choice": "none", "tools": [{"function": _FUNCTION}]},
    ],
    LEGACY: [
        {
            "context": [
                {"type": "System", "text": "Be brief.", "ts": "2026-01-02T03:04:05Z"},
                {"type": "Human", "text": "Weather?"},
                {"type": "AI", "text": "", "tool_calls": [_CALL]},
                {"type": "Tool", "text": "20 °C", "tool_call_id": "c1"},
            ],
            "config": "placeholder",
            "metadata": {
                "user_timezone": "Europe/Rome",
                "user_firstname": "Ada",
                "user_country": "IT",
                "user_region": None,
                "user_city": "Rome",
            },
            "temperature": 0.5,
            "stop_tokens": ["\n"],
            "max_tokens": 16,
            "top_p": 1,
            "web_search": False,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "server_target": "a",
            "response_format": {"type": "json_schema", "json_schema": _JSON_SCHEMA},
            "schemas": ["a"],
        },
        {"context": [{"type": "Question", "text": "Why?"}], "response_format": _TAGS, "tools": None},
        {"context": [], "stop_tokens": None, "max_tokens": None},
    ],
}


class Literal(str):
    """A number as it is to stand in the JSON text, digit for digit."""

    __slots__ = ()


def to_text(value: Any) -> str:
    """JSON text of a value that may hold Literals."""
    marked = json.dumps(_mark(value), ensure_ascii=False)
    return re.sub(r'"@literal ([^"]*)@"', r"\1", marked)


def _mark(value: Any) -> Any:
    if isinstance(value, Literal):
        return f"@literal {value}@"
    if isinstance(value, dict):
        return {key: _mark(child) for key, child in value.items()}
    return [_mark(child) for child in value] if isinstance(value, list) else value


def nested(depth: int, inside: Any = 1) -> Any:
    """A value within `depth` arrays and objects, by turns."""
    for level in range(depth):
        inside = [inside] if level % 2 else {"a": inside}
    return inside


NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 5, 16, 8.0, 0.5, -0.5, 1.5, 2.5, -2, 100, 100.5, 49152),
    *(2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**63 + 1, -(2**63) + 1, -(2**63), -(2**63) - 1, 2**64, 2**64 + 1),
    *(2**53 + 1, 10**18, 10**30, -(10**30), 10**400, -(10**4299)),
    *map(Literal, ("1e3", "1E+2", "-0", "-0.0", "1e300", "-1e300", "1e-300", "5e-324", "1.0e0", "4294967295.0")),
    *map(Literal, ("9223372036854775807.0", "9223372036854775808.0", "9.223372036854775809e18", "-1.0", "0.1e1")),
]
TEXTS = [
    *("", "a", "1", "1.0", "null", "true", "none", "auto", "required", "text", "json_object", "json_schema", "left"),
    *("structural_tag", "function", "user", "assistant", "tool", "system", "developer", "custom", "Human"),
    *("é", "日本語", "😀", "e\u0301", "\u0000", "a\nb", "\x1b[31m", "\u2028\x85\u202e", "a" * 1024, "a" * 1025),
    *("😀" * 1024, "😀" * 1025, '{"a": 1}', "[]", "[[[", "9" * 400, "\ufeff", "\\", '"'),
]
OTHERS: list[Any] = [
    *(None, True, False, [], {}, [None], [[]], [{}], [0], [1.0], [-1], ["a"], [""], [1, "a"], [[1], [2]], [[1], "a"]),
    *([True], [Literal("1e300")], [2**64], ["a"] * 5, [1] * 50, {"a": 1}, {"": None}, {"type": "text"}, {"1": 1}),
    *({"type": "json_schema"}, {"role": "user"}, {"role": "x", "content": "y"}, {"name": "f"}, {"function": {}}),
    *({"a\nb": "x"}, {"k" * 3000: "x"}, nested(3), nested(30), nested(150), {str(n): n for n in range(40)}),
]
VALUES: list[Any] = [*NUMBERS, *TEXTS, *OTHERS]
NAMES = ["", "x", "future_field", "type", "a\nb", "name", "custom_id", "body", "тест", "0", "k" * 3000, "tool_calls"]


def _replace(draw: random.Random, holder: Any, key: Any) -> None:
    holder[key] = copy.deepcopy(draw.choice(draw.choice((NUMBERS, TEXTS, OTHERS))))


def _remove(draw: random.Random, holder: Any, key: Any) -> None:
    del holder[key]


def _add(draw: random.Random, holder: Any, key: Any) -> None:
    value = copy.deepcopy(draw.choice(VALUES))
    if isinstance(holder, dict):
        holder[draw.choice(NAMES)] = value
    else:
        holder.insert(draw.randint(0, len(holder)), value)


def _wrap(draw: random.Random, holder: Any, key: Any) -> None:
    value = holder[key]
    holder[key] = draw.choice(([value], {"a": value}, [[value]], [value, value], nested(draw.randint(1, 100), value)))


def _unwrap(draw: random.Random, holder: Any, key: Any) -> None:
    value = holder[key]
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    holder[key] = draw.choice(children) if children else None


def _twist(draw: random.Random, holder: Any, key: Any) -> None:
    """The value in another type, or beside its bound."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = draw.choice((int(value), str(value).lower(), float(value), not value))
    elif isinstance(value, int | float):
        turned = [str(value), value + 1, value - 1, -value, bool(value), [value]]
        if abs(value) < 10**300:
            turned += [float(value), value + 0.5, Literal(f"{value}e0" if isinstance(value, int) else "1e1")]
        holder[key] = draw.choice(turned)
    elif isinstance(value, str):
        holder[key] = draw.choice((value * 2, value.upper(), value + "\u0000", len(value), [value], list(value[:50])))
    elif isinstance(value, list):
        holder[key] = draw.choice((value * 3, value[:1], value[::-1], dict(enumerate(map(str, value[:50])))))
    elif isinstance(value, dict):
        holder[key] = draw.choice((list(value), list(value.values()), {**value, **value}, to_text(value)))


def _take(draw: random.Random, holder: Any, key: Any) -> None:
    """The value of another field, of any of the bodies."""
    seeds = draw.choice(list(SEEDS.values()))
    body = draw.choice(seeds)
    holder[key] = copy.deepcopy(body[draw.choice(list(body))])


ACTS: list[Callable[[random.Random, Any, Any], None]] = [
    _replace,
    _replace,
    _twist,
    _remove,
    _add,
    _wrap,
    _unwrap,
    _take,
]


Path = tuple[str | int, ...]


def places(body: dict[str, Any]) -> Iterator[Path]:
    """The path of every value within a body."""
    below: list[tuple[Path, Any]] = [((), body)]
    while below:
        path, value = below.pop()
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for step, child in children:
            yield (*path, step)
            below.append(((*path, step), child))


def draw_place(draw: random.Random, body: dict[str, Any], deeper: float) -> Path:
    """The path of a value: of any field, then on into it by the chance `deeper` a step."""
    path: list[str | int] = [draw.choice(list(body))]
    value = body[path[0]]
    while isinstance(value, dict | list) and value and draw.random() < deeper:
        step: Any = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        path.append(step)
        value = value[step]
    return tuple(path)


def _open(body: dict[str, Any], path: Path) -> tuple[dict[str, Any], Any, Any]:
    """A copy of a body, with the holder and the key of one of its values."""
    body = copy.deepcopy(body)
    holder: Any = body
    for step in path[:-1]:
        holder = holder[step]
    return body, holder, path[-1]


def spoil(draw: random.Random, body: dict[str, Any], path: Path | None = None) -> dict[str, Any]:
    """A copy of a body with one change, at a place or anywhere."""
    if not body:
        return {}
    body, holder, key = _open(body, path or draw_place(draw, body, 0.75))
    draw.choice(ACTS)(draw, holder, key)
    return body


def vary(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A copy of a body with another value of the same type in one of its fields: the schema may take it, a rule not."""
    if not body:
        return {}
    body, holder, key = _open(body, draw_place(draw, body, 1.0))
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int | float):
        holder[key] = draw.choice(NUMBERS)
    elif isinstance(value, str):
        holder[key] = draw.choice(TEXTS)
    return body


def thin(draw: random.Random, body: dict[str, Any], kept: tuple[str, ...]) -> dict[str, Any]:
    """A copy of a body with few of its fields, those of `kept` among them."""
    chosen = {*kept, *draw.sample(list(body), min(len(body), draw.randint(0, 5)))}
    return {name: copy.deepcopy(value) for name, value in body.items() if name in chosen}
