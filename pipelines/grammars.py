"""Grammars, regular expressions and schemas of answers, compiled before an engine meets them.

Compiling takes what its writer makes it take: a few characters can ask for years. So it is done in a process of its
own, which is ended at the time limit. Equal constraints are compiled once.
"""

import json
import multiprocessing
from collections import OrderedDict
from concurrent.futures import TimeoutError as TooLate
from functools import cache
from typing import Any

from pebble import ProcessExpired, ProcessPool

from pipelines.constraints import compile_constraint
from schemas.dialects import EngineEndpoint
from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.rules import plain, refuse

TIME_LIMIT_S = 10.0
# A fresh process imports vLLM before it can compile.
_START_LIMIT_S = 300.0
_REMEMBERED = 4096
# The fields that give an answer its form. Tools do where a call is required, named, or to keep strictly to its schema.
_FORMS = ("structured_outputs", "response_format")
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


@cache
def load_compiler(path: str, limits: ModelLimits) -> "GrammarCompiler":
    """The compiler for a model's folder; one a process."""
    return GrammarCompiler(path, limits)


class GrammarCompiler:
    """Says whether the engine will take what a request asks of its answer's form."""

    def __init__(self, path: str, limits: ModelLimits, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._model = (path, limits.vocab_size, limits.tool_parser)
        self._time_limit_s = time_limit_s
        self._pool: ProcessPool | None = None
        self._is_warm = False
        self._known: OrderedDict[str, tuple[str, str] | None] = OrderedDict()

    def check(self, body: dict[str, Any], endpoint: EngineEndpoint) -> Failure | None:
        """A Failure when the body's constraint doesn't compile, or not in time. `body` passed the rules."""
        said = {name: body[name] for name in _FORMS if body.get(name)}
        if said.get("response_format", {}).get("type") in ("text", "json_object"):
            del said["response_format"]
        if endpoint == "/v1/chat/completions" and body.get("tools") and body.get("tool_choice") != "none":
            said |= {name: body[name] for name in _OF_TOOLS if body.get(name) is not None}
        if not said:
            return None
        field = next(iter(said))
        key = json.dumps(said, sort_keys=True)
        if key in self._known:
            self._known.move_to_end(key)
        else:
            self._known[key] = self._compile(key)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        fault = self._known[key]
        return None if fault is None else refuse(fault[0], field, fault[1])

    def _compile(self, key: str) -> tuple[str, str] | None:
        """Reason and message of what is wrong, if anything."""
        pool = self._warm_pool()
        try:
            found = pool.schedule(compile_constraint, (*self._model, key), timeout=self._time_limit_s).result()
        except TooLate:
            self._is_warm = False
            return "constraint_too_slow", f"it takes more than {self._time_limit_s:g} s to compile. Make it simpler"
        except ProcessExpired:
            self._is_warm = False
            return "bad_constraint", "compiling it ended the process that did it. Make it simpler"
        return None if found is None else ("bad_constraint", f"it doesn't compile ({plain(found, 300)})")

    def _warm_pool(self) -> ProcessPool:
        """The process that compiles, after its imports: those don't count to anybody's time."""
        if self._pool is None:
            self._pool = ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))
        if not self._is_warm:
            # One that needs all that any needs.
            tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
            any_constraint = json.dumps({"tools": [tool], "tool_choice": "required"})
            self._pool.schedule(compile_constraint, (*self._model, any_constraint), timeout=_START_LIMIT_S).result()
            self._is_warm = True
        return self._pool

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]  # pebble has no types for it
            self._pool.join()
            self._pool = None
            self._is_warm = False
