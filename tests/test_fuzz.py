"""Lines that went wrong in any way: each is one row, taken or refused by a known reason on one line, never a crash."""

import ast
import json
import random
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipelines.checks import Checks
from pipelines.grammars import GrammarCompiler
from pipelines.inputs import find_inputs
from pipelines.read import read_file
from pipelines.validate import Validator
from schemas import tables
from schemas.contract import SCHEMA_FILES, check_schema, parse_strict
from schemas.failures import ERROR_TYPES, Failure
from schemas.limits import ModelLimits
from schemas.shapes import recognise
from tests.conftest import DEMO, ROOT
from tests.mutations import CHATS, COMPLETIONS, SEEDS, VALUES, spoil, thin, to_text, vary

MAX_MESSAGE = 1_000
NUM_SHORT, NUM_LONG = 3_000, 100_000
SEEDS_OF_LONG = (2, 3, 4, 5)

# Of the embedded model; it chats, but its own template knows no tools.
LIMITS = ModelLimits(("smollm2-135m-instruct",), 8192, 49152, 20, 128, 32, chat_template="{{ messages }}")
WITH_TOOLS = replace(LIMITS, chat_template="{{ messages }}{{ tools }}{{ documents }}", tool_parser="hermes")
VALIDATORS = {
    "without chats": Validator(Checks("batch", None, replace(LIMITS, chat_template=None))),
    "chats": Validator(Checks("batch", None, LIMITS)),
    "tools": Validator(Checks("batch", None, WITH_TOOLS)),
    "all allowed": Validator(
        Checks("batch", None, replace(WITH_TOOLS, allowed=frozenset({"chat_template", "prompt_embeds"})))
    ),
    "strict": Validator(Checks("batch", None, WITH_TOOLS), strict=True),
    "completions": Validator(Checks("batch", None, LIMITS), endpoint=COMPLETIONS, fill={"max_tokens": 4}),
    "chats alone": Validator(Checks("batch", None, WITH_TOOLS), endpoint=CHATS, fill={"seed": 1}),
    "without limits": Validator(Checks("batch")),
}


# --- lines ----------------------------------------------------------------------------------------------------------


DEMO_LINES = DEMO.read_bytes().splitlines()
BODIES = [json.loads(line) for line in DEMO_LINES if b"broken" not in line]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Wetter in Köln?"}]},
    {"role": "assistant", "content": None, "tool_calls": SEEDS[CHATS][1]["messages"][1]["tool_calls"]},
    {"role": "tool", "tool_call_id": "c1", "content": "20 °C"},
    {"role": "user", "content": "And tomorrow?"},
]
BODIES += [{"messages": TURNS[:number], "max_tokens": 8} for number in range(1, 6)]
BODIES += [body for bodies in SEEDS.values() for body in bodies]
TELLING = ("prompt", "messages", "context")

JUNK = [
    *(b"\x00", b"\x01\x1b[2J\x7f", b"\r", b"\r\r", b"\t", b"\x0b\x0c", b"\x85", b"\xc2\x85", b"\xe2\x80\xa8", b"\xff"),
    *(
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe2\x82",
        b"\xef\xbb\xbf",
        b"\xe2\x80\xae",
        b"\n",
        b"\n \n",
    ),
    *(rb"\ud800", rb"\udc00\ud800", rb"\u0000", rb"\u000a", rb"\u2028", rb"\x", b"\\", b'"', b"'", b",", b",,", b":"),
    *(b"{", b"}", b"[", b"]", b"{}", b"[]", b"null", b"NaN", b"-Infinity", b"// no\t", b"/* */", b"1e999", b"-", b"."),
]
NUMBERS = [
    *(
        b"9" * 400,
        b"-" + b"9" * 4300,
        b"9" * 5000,
        b"1e308",
        b"1e309",
        b"-1E+9999",
        b"1e-9999",
        b"0." + b"0" * 500 + b"1",
    ),
    *(b"8.0", b"1e3", b"-0", b"-0.0", b"01", b"+1", b"1.", b".5", b"0x10", b"1_000", b"9223372036854775808", b"1e300"),
    *(b"-9223372036854775809", b"18446744073709551616", b"1" + b"0" * 30, b"Infinity", b"true", b"2.5", b"-1", b"0"),
]
TOKEN = re.compile(rb'"[^"\\]*"|-?\d[\d.eE+-]*')


def draw_line(draw):
    """A line of any shape, right or wrong; without a line feed, except where one strayed into it."""
    line = _whole_line(draw)
    if draw.random() < 0.4:
        for _ in range(draw.choice((1, 1, 2, 5))):
            line = draw.choice(BYTE_ACTS)(draw, line)
    return line


def _whole_line(draw):
    if draw.random() < 0.1:
        return draw.choice(DEMO_LINES)
    body = draw.choice(BODIES)
    if draw.random() < 0.9:
        body = thin(draw, body, TELLING)
        for _ in range(draw.choice((0, 1, 1, 2))):
            body = draw.choice((spoil, vary, vary))(draw, body)
    if draw.random() < 0.2:
        body = _with_strange_turn(draw, body)
    line = draw.choice(SHAPES)(draw, body)
    if draw.random() < 0.1:
        line = spoil(draw, line)
    return to_text(line).encode()


def _with_strange_turn(draw, body):
    """A chat with a message that has more than its role asks for; any other body as it is."""
    turns = body.get("messages")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return body
    return {**body, "messages": [{**turns[0], draw.choice(STRANGE): draw.choice(VALUES)}, *turns[1:]]}


def _strange(draw, body):
    """A body with a field of another one's; a body that names a model keeps what its schema doesn't know."""
    model = draw.choice(({}, {"model": LIMITS.served_names[0]}))
    return {**body, **model, draw.choice(STRANGE): draw.choice(VALUES)}


def _envelope(draw, body):
    fitting = {"prompt": COMPLETIONS, "messages": CHATS}
    url = next((url for name, url in fitting.items() if name in body), "/v1/completions")
    return {"custom_id": "c", "method": "POST", "url": draw.choice((url, url, "/v1/embeddings")), "body": body}


SHAPES = [
    lambda draw, body: body,
    lambda draw, body: body,
    lambda draw, body: {**body, **draw.choice(BODIES)},
    lambda draw, body: {"custom_id": "c", "body": body, "column": {"a\nb": 1}},
    lambda draw, body: {"recordId": "r\x1b[31m", "modelInput": body},
    lambda draw, body: {"custom_id": "c", "body": _strange(draw, body)},
    _strange,
    _envelope,
    _envelope,
]
# Names that some body has a meaning for, and that this one's schema may not know.
STRANGE = [
    *("column", "a\nb", "\x1b[31m", "k" * 3000, "structured_outputs", "max_completion_tokens", "messages", "prompt"),
    *("logprob_token_ids", "tools", "best_of", "request_id", "custom_id", "body", "params", "inputs", "extra_body"),
    *("tool_calls", "tool_calls", "refusal", "function_call", "audio", "name", "response_format", "echo", "modelInput"),
]


def _flip(draw, line):
    changed = bytearray(line or b"x")
    for _ in range(draw.choice((1, 1, 3, 20))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw, line):
    start, end = sorted((draw.randint(0, len(line)), draw.randint(0, len(line))))
    return draw.choice((line[:end], line[start:], line[:start] + line[end:]))


def _splice(draw, line):
    other = _whole_line(draw)
    return line[: draw.randint(0, len(line))] + other[draw.randint(0, len(other)) :]


def _repeat(draw, line):
    start, end = sorted((draw.randint(0, len(line)), draw.randint(0, len(line))))
    return line[:end] + line[start:end] * draw.choice((1, 1, 2, 10)) + line[end:]


def _insert(draw, line):
    place = draw.randint(0, len(line))
    return line[:place] + draw.choice(JUNK) * draw.choice((1, 1, 1, 50)) + line[place:]


def _put_number(draw, line):
    return _exchange(draw, line, draw.choice(NUMBERS))


def _nest(draw, line):
    depth = draw.choice((50, 190, 200, 1_000, 10_000))
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return _exchange(draw, line, opening * depth + b"1" + closing * draw.choice((depth, depth, 0)))


def _repeat_key(draw, line):
    return b'{"%s": %s, ' % (draw.choice((b"prompt", b"messages", b"model", b"seed", b"body")), b"1") + line[1:]


def _enormous_key(draw, line):
    key = draw.choice((b"k", b"\xc3\xa4", b"\\n", b"\\u001b")) * draw.choice((100, 1_000, 50_000))
    value = draw.choice((b"1", b"1e999", b'{"a":1e999}', b"[[1e999]]"))
    return b'{"%s": %s, ' % (key, value) + draw.choice((line[1:], b'"%s": 2}' % key, b'"prompt": "a"}'))


def _exchange(draw, line, new):
    """One string or number of the text for something else."""
    found = list(TOKEN.finditer(line))
    if not found:
        return line + new
    token = draw.choice(found)
    return line[: token.start()] + new + line[token.end() :]


BYTE_ACTS = [_flip, _flip, _cut, _splice, _repeat, _insert, _insert, _put_number, _put_number, _repeat_key]
BYTE_ACTS = [*BYTE_ACTS * 4, _nest, _enormous_key]


# --- what must hold -------------------------------------------------------------------------------------------------


def known_reasons():
    """Every reason that the code of reading and checking gives, by its source."""
    places = {"refuse": 0, "_Refused": 0, "Failure": 1, "add": 3}
    found = set()
    stages = (ROOT / "pipelines" / f"{name}.py" for name in ("read", "validate", "tokens", "grammars"))
    for file in (*(ROOT / "schemas").glob("*.py"), *stages):
        for node in ast.walk(ast.parse(file.read_text())):
            given = []
            if isinstance(node, ast.Call):
                place = places.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
                given = node.args[place : place + 1] if place is not None else []
            elif isinstance(node, ast.Tuple) and file.stem == "grammars":
                given = node.elts[:1]
            found |= {one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


REASONS = known_reasons()


def physical_lines(data):
    """Number, offset and text of each line that isn't blank, as the README defines a line."""
    offset = 0
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, offset, line.rstrip(b"\r")
        offset += len(line) + 1


def assert_fate(row, reasons=REASONS):
    """One row of `tables.CHECKED` is a request or a rejection, whole."""
    if row["reason"] is None:
        body = parse_strict(row["request"].encode())
        assert isinstance(body, dict) and row["endpoint"] in SCHEMA_FILES and row["id"]
        assert row["num_prompt_tokens"] >= 0 and row["unknown_fields"] is not None
        assert row["extra"] is None or not isinstance(parse_strict(row["extra"].encode()), Failure)
        assert all(row[name] is None for name in ("message", "status_code", "stage", "raw"))
        return
    assert row["reason"] in reasons, row["reason"]
    assert row["request"] is None and row["id"] and row["stage"] in ("read", "validate")
    assert 400 <= row["status_code"] < 500 and row["type"] == ERROR_TYPES[row["status_code"]]
    assert row["message"].isprintable() and 0 < len(row["message"]) <= MAX_MESSAGE, ascii(row["message"][:2000])
    assert row["param"] is None or (row["param"].isprintable() and len(row["param"]) < 300), ascii(row["param"][:500])


def check_file(path, validator):
    """The rows of a file, as the batch door makes them, each seen to be whole."""
    checked = [validator(block) for block in read_file(find_inputs((str(path),))[0])]
    table = pa.concat_tables(checked)
    table.filter(pc.is_valid(table["reason"])).select(tables.REJECTIONS.names).cast(tables.REJECTIONS)
    table.filter(pc.is_null(table["reason"])).select(tables.REQUESTS.names).cast(tables.REQUESTS)
    rows = table.to_pylist()
    for row in rows:
        assert_fate(row)
    return rows


def fuzz(folder, seed, num_lines):
    """Reasons of the drawn lines, None for those that were taken; each line seen to be one row."""
    draw = random.Random(seed)  # noqa: S311 - the same lines each time
    fates = []
    for number, validator in enumerate(VALIDATORS.values()):
        drawn = [draw_line(draw) for _ in range(num_lines // len(VALIDATORS))]
        # The first line decides what a file holds; see the test of beginnings for others.
        data = draw.choice((b"\n", b"\r\n")).join([b'{"prompt": "first"}', *drawn])
        path = folder / f"{number}.jsonl"
        path.write_bytes(data)
        rows = check_file(path, validator)
        expected = list(physical_lines(data))
        assert [(row["source_line"], row["source_offset"]) for row in rows] == [place[:2] for place in expected]
        for row, (_, _, line) in zip(rows, expected, strict=True):
            assert row["raw"] is None or row["raw"] == line[: tables.RAW_BYTES]
        fates += [row["reason"] for row in rows]
    return fates


class UncheckedGrammars(GrammarCompiler):
    """Takes every constraint that is one, without the seconds that the real one needs to start."""

    def _compile(self, key):
        json.loads(key)


@pytest.fixture
def without_grammars(monkeypatch):
    made = {}
    monkeypatch.setattr(
        "pipelines.checks.load_compiler", lambda path, limits: made.setdefault(limits, UncheckedGrammars(path, limits))
    )
    for validator in VALIDATORS.values():
        validator.checks.__dict__.pop("_compiler", None)
    yield
    for validator in VALIDATORS.values():
        validator.checks.__dict__.pop("_compiler", None)


def assert_fair(fates):
    """Enough lines got as far as the last check, and enough kinds of faults were met, for the set to mean something."""
    assert 0.1 < sum(fate is None for fate in fates) / len(fates) < 0.7
    assert len(set(fates)) > 20


# --- tests ----------------------------------------------------------------------------------------------------------


def test_reasons_are_found_in_the_source():
    assert {"schema", "invalid_json", "line_too_long", "not_an_object", "prompt_too_long", "unknown_field"} <= REASONS


@pytest.mark.timeout(180)
def test_each_drawn_line_is_one_row(tmp_path, without_grammars):
    assert_fair(fuzz(tmp_path, 1, NUM_SHORT))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS_OF_LONG)
def test_each_of_many_drawn_lines_is_one_row(tmp_path, seed):
    assert_fair(fuzz(tmp_path, seed, NUM_LONG // len(SEEDS_OF_LONG)))


def test_a_file_with_any_beginning_is_rows_or_one_fault(tmp_path, without_grammars):
    draw = random.Random(6)  # noqa: S311 - the same files each time
    magics = [
        b"\x1f\x8b",
        b"\x28\xb5\x2f\xfd",
        b"PAR1",
        b"PK\x03\x04",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"[",
        b"[{",
        b"{",
        b"",
    ]
    for number in range(300):
        head = draw.choice(magics) + draw_line(draw)[: draw.choice((0, 1, 5, 100_000))]
        data = head + b"\n" + b"\n".join(draw.choice(DEMO_LINES) for _ in range(3)) + b"\n"
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(data)
        *rows, last = check_file(path, VALIDATORS["tools"])
        if last["source_line"] is None:
            assert last["reason"] in ("not_jsonl", "unreadable_file")
            assert last["reason"] == "unreadable_file" or not rows
        else:
            numbers = [place for place, _, line in physical_lines(data) if line != b"\xef\xbb\xbf"]
            assert [row["source_line"] for row in (*rows, last)] == numbers


MODEL = LIMITS.served_names[0]
TURN = {"role": "user", "content": "a"}
LONG = "k" * 3000


@pytest.mark.parametrize(
    ("line", "reason", "param"),
    [
        ({"messages": [{**TURN, "tool_calls": 5}]}, "unsupported_field", "messages[0].tool_calls"),
        ({"messages": [{**TURN, "tool_calls": [{"type": "function"}]}]}, "unsupported_field", "messages[0].tool_calls"),
        ({"messages": [TURN], "model": MODEL, "structured_outputs": 5}, "bad_constraint", "structured_outputs"),
        (
            {"messages": [TURN], "model": MODEL, "prompt": None, "max_tokens": 0, "echo": True},
            "out_of_range",
            "max_tokens",
        ),
        ({"prompt": "a", "model": MODEL, "max_completion_tokens": "b"}, None, None),
        ({"prompt": "a", "model": MODEL, "max_completion_tokens": [], "min_tokens": 17}, "out_of_range", "min_tokens"),
        ({"prompt": "a", "model": MODEL, "messages": None, "min_tokens": 17}, "out_of_range", "min_tokens"),
        ({"prompt": "a", "logit_bias": {"a\nb": 1}}, "token_out_of_vocabulary", r"logit_bias.a\nb"),
        ({"prompt": "a", "logit_bias": {"a\nb": "c"}}, "schema", r"logit_bias.a\nb"),
        ({"modelInput": {"a\nb" * 3000: 1}}, "unsupported_shape", "modelInput"),
        ({"prompt": "a", "model": "\U000e0001" * 100}, "unknown_model", "model"),
        ({"prompt": "a", "temperature": -(10**4299), "n": 2}, "out_of_range", "temperature"),
        ({"prompt": "a", "n": 2, "temperature": -(10**4299)}, "choices_need_sampling", "n"),
        (
            {"messages": [], "logits_processors": [{"qualname": "a", LONG: 1}]},
            "schema",
            "logits_processors[0]." + "k" * 60 + "…",
        ),
        (
            {"messages": [TURN], "tools": [{"function": {"name": "a\nb"}}], "tool_choice": {"function": {"name": "c"}}},
            "bad_tools",
            "tool_choice.function.name",
        ),
        (f'{{"{LONG}": 1, "{LONG}": 2}}', "invalid_json", None),
        ('{"a\\nb": {"c": [1, 1e999]}}', "invalid_json", r"a\nb.c[1]"),
        (f'{{"{LONG}": 1e999}}', "invalid_json", "k" * 60 + "…"),
        ("\x1b[31m\x00\r\u2028", "invalid_json", None),
    ],
)
def test_what_once_broke_a_check_or_its_message(line, reason, param):
    text = line if isinstance(line, str) else json.dumps(line)
    row = {"source_index": 0, "source_file": "f", "source_line": 1, "source_offset": 0, "line": text.encode()}
    judged = VALIDATORS["tools"](pa.Table.from_pylist([row], schema=tables.LINES)).to_pylist()[0]
    assert_fate(judged)
    assert (judged["reason"], judged["param"]) == (reason, param)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"messages": [{"role": "user", "content": [5] * 200_000}]}, CHATS),
        ({"messages": [{"role": "user", "content": 5}] * 200_000}, CHATS),
        ({"prompt": [1] * 200_000 + [-1]}, COMPLETIONS),
        ({"prompt": [["a"]] * 200_000}, COMPLETIONS),
        ({"prompt": "a", "stop": [1] * 200_000}, COMPLETIONS),
        ({"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(200_000)), "x")}, COMPLETIONS),
    ],
)
def test_a_line_of_many_faults_costs_no_more_than_its_length(body, endpoint):
    """Told of all at once, one such line took gigabytes and minutes."""
    assert check_schema(body, endpoint).reason == "schema"


@pytest.mark.timeout(60)
def test_a_line_of_many_columns_or_a_long_name_costs_no_more_than_its_length():
    columns = {"prompt": "a", **{f"column {number}": number for number in range(200_000)}}
    assert len(recognise(columns).extra) == 200_000
    failure = parse_strict(b'{"%s": [%s1e999]}' % (b"k" * 1_000_000, b"1," * 500_000))
    assert failure.reason == "invalid_json"
