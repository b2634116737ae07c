"""Templates: paths with a date in them, such as `s3://b/in/{date:%Y/%m/%d}/*.jsonl`. Pure; nothing in them runs.

`{date}` is the night's date, `{yesterday}` the one before, `{date-7}` and `{date+1}` so many days off. After a colon
stands Python's format of a date; without one it is YYYY-MM-DD. A brace itself is written twice.
"""

import re
import string
from collections.abc import Iterator
from datetime import date, timedelta

_FIELD = re.compile(r"(date|yesterday)([+-]\d{1,4})?")
# The directives that a date answers, alike on every system; a dash before one leaves its zeros out.
_FORMAT = re.compile(r"(?:[^%{}\0]|%%|%-?[YymdjGVuUWwaAbB])*")


def render(template: str, night: date) -> str:
    """The path for a night. Raises ValueError that says what is wrong with the template."""
    parts = []
    for literal, days, form in _pieces(template):
        parts.append(literal)
        if days is not None:
            try:
                day = night + timedelta(days=days)
            except OverflowError:
                raise ValueError(f"{template}: a date {days} days off {night} is none") from None
            parts.append(format(day, form) if form else day.isoformat())
    return "".join(parts)


def has_date(template: str) -> bool:
    """Whether a path is another one each night. Raises ValueError."""
    return any(days is not None for _, days, _ in _pieces(template))


def _pieces(template: str) -> Iterator[tuple[str, int | None, str]]:
    """What stands before each field, the field's days off the night (None: no field follows), and its format."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{template}: {error}. Write a brace itself as {{{{ or }}}}") from None
    for literal, name, form, conversion in pieces:
        if name is None:
            yield literal, None, ""
            continue
        known = _FIELD.fullmatch(name)
        if known is None or conversion is not None:
            raise ValueError(
                f"{template}: found {{{name}}}, expected {{date}}, {{yesterday}} or {{date-7}}, with a format as "
                "{date:%Y/%m/%d}. Write a brace itself twice"
            )
        if not _FORMAT.fullmatch(form or ""):
            raise ValueError(f"{template}: found the format {form!r}, expected one of a date, such as %Y/%m/%d")
        yield literal, int(known[2] or 0) - (known[1] == "yesterday"), form or ""
