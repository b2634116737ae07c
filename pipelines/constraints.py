"""Constraints of an answer's form, as the engine would take them: vLLM's own checks, and xgrammar's compiler."""

from functools import cache
from typing import Any

import jiter

from pipelines.translation import one_line


@cache
def tool_parser(name: str | None) -> str:
    """By which name vLLM has the parser of a model's tool calls; None: no way of its own is known.

    Then calls that a request requires or names are given their form by a grammar, and are read as what it lets through.
    """
    if name is not None:
        return name
    from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

    class AnyCall(ToolParser):  # type: ignore[misc]  # vLLM's classes have no types here
        pass

    ToolParserManager.register_module("any", module=AnyCall, force=True)
    return "any"


def strict(parser: Any) -> Any:
    """A parser class of vLLM's, under which calls that a request requires or names keep to their schemas: by itself it
    gives their arguments a form only where a tool says `strict`."""
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    class Strict(parser):  # type: ignore[misc]  # vLLM's classes have no types here
        def adjust_request(self, request: Any) -> Any:
            if request.tool_choice not in (None, "none", "auto"):
                self.tool_strict_level = ToolStrictLevel.PARAMETER
            return super().adjust_request(request)

    return Strict


def compile_constraint(path: str, vocab_size: int, parser: str | None, constraint: str) -> str | None:
    """What the engine would say against a constraint of an answer's form; None: it would take it.

    `constraint`: JSON of a body's `structured_outputs`, `response_format`, or `tools` with what is said of them, under
    these names. `parser`: as `--engine tool_parser`. For a process that can be ended: it takes as long as the
    constraint makes it.
    """
    from types import SimpleNamespace

    from vllm.sampling_params import SamplingParams
    from vllm.v1.structured_output.request import get_structured_output_key

    try:
        wanted = _wanted(path, parser, jiter.from_json(constraint.encode()))
        if wanted is None:
            return None
        params = SamplingParams(structured_outputs=wanted)
        params._validate_structured_outputs(
            SimpleNamespace(is_diffusion=False),
            SimpleNamespace(backend="xgrammar"),
            _tokenizer(path),
        )
        _xgrammar(path, vocab_size).compile_grammar(*get_structured_output_key(params.structured_outputs))
    except Exception as error:  # of vLLM, of xgrammar's C++, of pydantic
        return one_line(str(error))[:300]
    return None


def _wanted(path: str, parser: str | None, said: dict[str, Any]) -> Any:
    """vLLM's own word for the form that a body's fields give its answer; None where they give it none."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **said})
    if request.tools:
        kind = ParserManager.get_parser(
            tool_parser_name=tool_parser(parser), enable_auto_tools=True, tokenizer=_tokenizer(path)
        )
        request = strict(kind)(_tokenizer(path), request.tools).adjust_request(request)
    return request.extract_structured_outputs()


@cache
def _tokenizer(path: str) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(path)


@cache
def _xgrammar(path: str, vocab_size: int) -> Any:
    from types import SimpleNamespace

    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    settings = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        model_config=None,
        speculative_config=None,
    )
    return XgrammarBackend(settings, tokenizer=_tokenizer(path), vocab_size=vocab_size)
