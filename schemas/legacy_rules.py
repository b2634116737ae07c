"""Rules for legacy chat bodies. Like those of `schemas/rules.py`."""

from collections.abc import Mapping
from typing import Any

from schemas.chat_rules import check_calls, check_tools
from schemas.failures import Failure
from schemas.rules import COMMON, Body, Judge, Rule, refuse, unsupported, whole
from schemas.turns import PLACEHOLDER, role_of


def _context(field: str, value: list[dict[str, Any]], body: Body, judge: Judge) -> Failure | None:
    if not value:
        return refuse("empty_prompt", field, "found no turn, expected one at least")
    if judge.limits is not None and judge.limits.chat_template is None:
        return refuse("no_chat_template", field, "the model has no chat template, so it can't chat")
    for index, turn in enumerate(value):
        if (failure := next(check_calls(f"{field}[{index}]", _as_message(turn), judge), None)) is not None:
            return failure
    return None


def _as_message(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn as far as the calls in it are judged."""
    return {"role": role_of(turn["type"]), "tool_calls": turn.get("tool_calls")}


def _config(field: str, value: str, body: Body, judge: Judge) -> Failure | None:
    return None if value == PLACEHOLDER else COMMON["model"](field, value, body, judge)


def _tools(field: str, value: list[dict[str, Any]], body: Body, judge: Judge) -> Failure | None:
    # An empty list is this field's default.
    return check_tools(field, value, body, judge) if value else None


LEGACY_CHAT: Mapping[str, Rule] = {
    "context": _context,
    "config": _config,
    "tools": _tools,
    "max_tokens": whole(1),
    "stop_tokens": COMMON["stop"],
    "schemas": unsupported("what they are for isn't documented", "Give response_format"),
    **{name: COMMON[name] for name in ("temperature", "top_p", "response_format")},
}
