"""All that is asked of a request before an engine is: the same for every door, in one order."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipelines.grammars import GrammarCompiler, load_compiler
from pipelines.model import resolve
from pipelines.prefixes import path_of
from pipelines.tokens import Prompt, PromptCounter, load_counter
from schemas.contract import check_body
from schemas.dialects import engine_endpoint, in_words_of, to_engine
from schemas.failures import Failure
from schemas.limits import ModelLimits
from schemas.requests import Endpoint
from schemas.rules import Door, Judge


@dataclass(frozen=True)
class Checks:
    """The checks of one door for one model. Picklable; tokenizer and compiler are loaded where they are first needed.

    `model`: as `--model` names it. Without `limits` only the schema and the rules that need no model are asked.
    """

    door: Door
    model: str | None = None
    limits: ModelLimits | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("door", "model", "limits")}

    def check(self, body: Any, endpoint: Endpoint) -> Prompt | Failure:
        """The prompts of a body that was parsed strictly, or its first fault."""
        failure = check_body(body, endpoint, self._judge)
        if failure is not None:
            return failure
        if self.limits is None:
            return Prompt(0, path_of(()))
        asked, kind = to_engine(body, endpoint, self.limits), engine_endpoint(endpoint)
        found = self._compiler.check(asked, kind) or self._counter.count(asked, kind)
        return in_words_of(found, body, endpoint) if isinstance(found, Failure) else found

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.door, self.limits)

    @cached_property
    def _counter(self) -> PromptCounter:
        assert self.limits is not None
        return load_counter(resolve(self.model).path, self.limits)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        assert self.limits is not None
        return load_compiler(resolve(self.model).path, self.limits)
