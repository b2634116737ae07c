"""Prompts as the engine will see them, with the model's own tokenizer and chat template: their lengths and places."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jiter

from pipelines.prefixes import path_of
from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.requests import Endpoint
from schemas.rules import max_tokens_of, plain, refuse

# Kinds of tokenizers that transformers takes from the file as it is; others it changes by their configuration.
_AS_FILED = ("TokenizersBackend", "PreTrainedTokenizerFast")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request's prompt comes to: tokens (of all prompts, where there are several), and the path of the first
    (`pipelines/prefixes.py`)."""

    num_tokens: int
    path: bytes
    num_prompts: int = 1


@cache
def load_counter(path: str, limits: ModelLimits) -> "PromptCounter":
    """The counter of a model's folder; one a process."""
    return PromptCounter(path, limits)


class PromptCounter:
    """Counts a request's prompt tokens, and refuses one that the model's context can't hold with its answer."""

    def __init__(self, path: str, limits: ModelLimits) -> None:
        self._path = path
        self._limits = limits

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer of transformers, with the chat template. Slow to load, for torch comes with it."""
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        return AutoTokenizer.from_pretrained(self._path, local_files_only=True)

    @cached_property
    def _fast_tokenizer(self) -> Any:
        """The Rust tokenizer itself; None for the few models that have none."""
        folder = Path(self._path)
        file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
        if file.is_file() and config.is_file() and json.loads(config.read_text()).get("tokenizer_class") in _AS_FILED:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(file))
        return getattr(self._tokenizer, "backend_tokenizer", None)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the vocabulary's longest token: a text has at least its length over this many tokens."""
        return max(map(len, (self._fast_tokenizer or self._tokenizer).get_vocab()), default=1)

    def count(self, body: dict[str, Any], endpoint: Endpoint) -> Prompt | Failure:
        """The prompts of a body that passed the rules; or a Failure with the three numbers."""
        if endpoint == "/v1/chat/completions":
            prompts = {"messages": body["messages"]}
        elif (prompt := body.get("prompt")) is None:
            prompts = {}
        elif isinstance(prompt, str) or isinstance(prompt[0], int | float):
            prompts = {"prompt": prompt}
        else:
            prompts = {f"prompt[{index}]": one for index, one in enumerate(prompt)}
        total = 0
        first: Sequence[int] = ()
        for field, one in prompts.items():
            tokens = self._chat(body) if field == "messages" else self._tokens(one, body)
            if isinstance(tokens, Failure):
                return tokens
            length = self._fit(field, tokens, body, endpoint)
            if isinstance(length, Failure):
                return length
            first = first if total else self._kept(tokens, length, body)
            total += length
        return Prompt(total, path_of(first, self._root(body)), len(prompts) or 1)

    def _root(self, body: dict[str, Any]) -> str:
        """What the prompt's cache is kept apart by: the adapter, and the salt."""
        model = body.get("model")
        return f"{model if model in self._limits.adapter_names else ''}\0{body.get('cache_salt') or ''}"

    @staticmethod
    def _kept(tokens: Sequence[int], length: int, body: dict[str, Any]) -> Sequence[int]:
        """What is left of a prompt that is truncated: its end, unless the request says its beginning."""
        return tokens[:length] if body.get("truncation_side") == "right" else tokens[len(tokens) - length :]

    def _tokens(self, prompt: str | list[int], body: dict[str, Any]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._encode(prompt, body.get("add_special_tokens", True))

    def _encode(self, text: str, with_special_tokens: bool) -> Sequence[int]:
        at_least = -(-len(text) // self._longest_token)
        if at_least > self._limits.context_length:
            # Not worth the minutes that cutting it into tokens could take: too long, or truncated to less than this.
            return range(at_least)
        if self._fast_tokenizer is not None:
            # Without offsets and the objects around them: two thirds of the time.
            ids: list[int] = self._fast_tokenizer.encode_batch_fast([text], add_special_tokens=with_special_tokens)[
                0
            ].ids
            return ids
        return list(self._tokenizer.encode(text, add_special_tokens=with_special_tokens))

    def _chat(self, body: dict[str, Any]) -> Sequence[int] | Failure:
        try:
            text = self._tokenizer.apply_chat_template(
                [_as_templates_take_it(message) for message in body["messages"]],
                tools=[_as_engine_gives_it(tool) for tool in body.get("tools") or ()] or None,
                documents=body.get("documents"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                continue_final_message=body.get("continue_final_message", False),
                chat_template=body.get("chat_template"),
                tokenize=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # a template raises what it likes: jinja's errors, and its writer's own
            words = plain(" ".join(str(error).split()), 200)
            return refuse("template_refused", "messages", f"the model's chat template doesn't take them ({words})")
        return self._encode(text, body.get("add_special_tokens", False))

    def _fit(self, field: str, tokens: Sequence[int], body: dict[str, Any], endpoint: Endpoint) -> int | Failure:
        """How many tokens of a prompt the engine takes."""
        context, length = self._limits.context_length, len(tokens)
        if length == 0:
            return refuse("empty_prompt", field, "found a text that gives no token, expected a prompt of one at least")
        if (kept := body.get("truncate_prompt_tokens")) is not None:
            length = min(length, int(kept) if kept > 0 else context - 1)
        asked = max_tokens_of(body, endpoint)
        if length + (1 if asked is None else asked) <= context:
            return length
        answer = "an answer of one token at least" if asked is None else f"max_tokens {asked:,}"
        if endpoint == "/v1/completions" and body.get("max_tokens") is None and asked is not None and asked < context:
            answer += " (the default)"
        message = (
            f"found {length:,} prompt tokens and {answer}, more than the model's context of {context:,} tokens. "
            f"Shorten one, or give truncate_prompt_tokens"
        )
        return refuse("prompt_too_long", field, message)


def _as_templates_take_it(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the engine gives it to a template that takes texts alone: parts as one text, a line each, and the
    arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        texts = (part if isinstance(part, str) else part.get("text", part.get("refusal", "")) for part in content)
        content = "\n".join(texts)
    given = {**message, "content": content or ""}
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = [_call(call) for call in calls]
    return given


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = jiter.from_json(function["arguments"].encode() or b"{}")
    # In the order of the engine's own types: templates write calls out as they are.
    return {"id": call["id"], "function": {"arguments": arguments, "name": function["name"]}, "type": "function"}


def _as_engine_gives_it(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that the engine adds and in its order: templates write tools out as they are."""
    function = tool["function"]
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    known |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": tool.get("type", "function"), "function": known}
