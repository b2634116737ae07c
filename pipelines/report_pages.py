"""Pages: templates with data that others wrote, as HTML files which load nothing and execute none of it.

Everything that a template puts in is escaped, and what would hide or reorder text (control characters, marks of
direction) is shown by its number. A policy in the page (CSP) forbids every request and every script but its own.
"""

import base64
import hashlib
import json
import unicodedata
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

# Kinds of characters that are not seen, or change where others are seen.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_SHOWN = "\n\t"
# They join letters and emoji that are one to their readers.
_JOINERS = "\u200c\u200d"
_THOUSAND = 1_000


def render(template: str, **values: Any) -> str:
    """A page of `pages/`, filled in."""
    return _pages().get_template(template).render(**values)


@cache
def _pages() -> Environment:
    pages = Environment(
        loader=PackageLoader("pipelines", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"visible": visible, "clock": clock, "short": short, "number": number, "json": as_json}
    pages.globals |= {"own": own_file, "digest": digest}
    return pages


@cache
def own_file(name: str) -> Markup:
    """A style sheet or script of ours, as it is."""
    return Markup(files("pipelines").joinpath("pages", name).read_text())  # noqa: S704 - a file of the package


def digest(text: str) -> str:
    """What a policy names a script or style sheet by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def as_json(value: Any) -> Markup:
    """JSON for a `script` element of data, which none of its texts can end."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for one in "<>&":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return Markup(text)  # noqa: S704 - nothing of it is markup any more


def visible(text: str | None) -> str:
    """A text of others in which nothing hides: a mark that turns the direction round is seen as [U+202E]."""
    return "".join(
        one if one in _SHOWN or one in _JOINERS or unicodedata.category(one) not in _HIDDEN else f"[U+{ord(one):04X}]"
        for one in text or ""
    )


def clock(seconds: float) -> str:
    """`0:42`, `1:02:03`; below ten seconds with tenths."""
    if 0 < seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """`1,234,567`; broken ones with two digits more."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def short(value: float) -> str:
    """`950`, `1.2k`, `35M`: three digits at most."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < _THOUSAND - 0.5 or unit == "T":
            return f"{value:.3g}{unit}"
        value /= _THOUSAND
    return f"{value:.3g}"
