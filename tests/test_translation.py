"""Every error that vLLM has for a request is told as one of ours: none is missed, nobody blamed for another's."""

import ast
import asyncio
import re
import subprocess
import sys
from functools import cache
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

from pipelines.translation import ABORTED, MAX_MESSAGE_CHARS, one_line, translate, translate_response
from schemas.failures import EngineUnusable, Failure
from tests.conftest import ROOT

VLLM = Path(find_spec("vllm").submodule_search_locations[0])

# What stands between a request's body and its answer.
SERVING = (
    "connections.py",
    "entrypoints/generate/base",
    "entrypoints/generate/beam_search",
    "entrypoints/openai/chat_completion",
    "entrypoints/openai/completion",
    "entrypoints/openai/models",
    "entrypoints/serve/engine",
    "entrypoints/serve/exception_handling",
    "inputs",
    "multimodal/media",
    "renderers",
    "sampling_params.py",
    "tokenizers",
    "v1/engine/async_llm.py",
    "v1/engine/core_client.py",
    "v1/engine/exceptions.py",
    "v1/engine/input_processor.py",
    "v1/engine/output_processor.py",
    "v1/structured_output",
)


def words(cls):
    return cls("some words")


def bare(cls):
    return cls()


REFUSED = (400, "invalid_request", None)
FAILED = (500, "engine_error", None)
BUSY = (503, "overloaded", None)

# Where a class is found; one error of it; its status, reason and param; words of the message.
CASES = [
    ("vllm.exceptions:VLLMError", words, FAILED, "failed on this request: some words"),
    ("vllm.exceptions:VLLMClientError", words, REFUSED, "some words"),
    ("vllm.exceptions:VLLMServerError", words, FAILED, "failed on this request: some words"),
    (
        "vllm.exceptions:VLLMValidationError",
        lambda cls: cls("top_p must be in (0, 1], got 7.", parameter="top_p", value=7),
        (400, "invalid_request", "top_p"),
        "top_p must be in (0, 1], got 7.",
    ),
    ("vllm.exceptions:VLLMNotFoundError", words, (404, "unknown_model", "model"), "some words"),
    (
        "vllm.exceptions:LoRAAdapterNotFoundError",
        lambda cls: cls("sql", "/data/adapters/sql"),
        (404, "unknown_adapter", "model"),
        "Loading lora sql failed: No adapter found for <path>",
    ),
    (
        "vllm.exceptions:VLLMUnprocessableEntityError",
        lambda cls: cls("the image can't be read", parameter="image_url", value="https://example.com/a"),
        (422, "unprocessable", "image_url"),
        "the image can't be read",
    ),
    ("vllm.exceptions:GenerationError", bare, FAILED, "failed on this request: Internal server error"),
    ("vllm.exceptions:RetryableRequestError", bare, (503, "transient", None), "please retry"),
    (
        "vllm.exceptions:GracefulHTTPError",
        lambda cls: cls("not now", HTTPStatus.TOO_MANY_REQUESTS),
        (429, "overloaded", None),
        "not now",
    ),
    ("vllm.exceptions:QueueOverflowError", bare, BUSY, "currently busy"),
    ("vllm.exceptions:MaxQueuedTokensError", bare, BUSY, "backlog limit"),
    ("vllm.exceptions:ProfilerAlreadyActiveError", bare, (409, "conflict", None), "profiling session"),
    (
        "vllm.connections:HTTPResponseSizeExceededError",
        lambda cls: cls(1024, 2048),
        (400, "invalid_request", "audio_filesize_mb"),
        "maximum size of 1024 bytes",
    ),
    ("vllm.connections:MediaDownloadSizeExceededError", lambda cls: cls(1024), REFUSED, "media download exceeds"),
    ("vllm.v1.engine.exceptions:EngineGenerateError", bare, FAILED, "failed on this request, and gave no reason"),
    ("vllm.v1.engine.async_llm:InputStreamError", lambda cls: cls(KeyError("a")), FAILED, "failed on this request"),
    ("vllm.renderers.chat_utils:ChatTemplateResolutionError", words, REFUSED, "refused this request: some words"),
    (
        "jinja2:TemplateError",
        lambda cls: cls("roles must alternate"),
        REFUSED,
        "chat template refused the messages: roles must alternate",
    ),
    (
        "pydantic:ValidationError",
        lambda cls: cls.from_exception_data("Body", [{"type": "missing", "loc": ("prompt", 3), "input": {}}]),
        (400, "invalid_request", "prompt[3]"),
        "Field required",
    ),
    ("builtins:ValueError", words, REFUSED, "refused this request: some words"),
    ("builtins:TypeError", words, REFUSED, "refused this request: some words"),
    ("builtins:OverflowError", words, REFUSED, "refused this request: some words"),
    ("json:JSONDecodeError", lambda cls: cls("Expecting value", "", 0), REFUSED, "refused this request: Expecting"),
    ("builtins:NotImplementedError", bare, (501, "unsupported", None), "can't do what this request asks for"),
    ("asyncio:CancelledError", bare, (500, "aborted", None), "gave the request up"),
    ("pipelines.translation:GivenUp", bare, (500, "aborted", None), "gave the request up"),
    ("builtins:GeneratorExit", bare, (500, "aborted", None), "gave the request up"),
    # Nothing that vLLM means to tell: a fault in its own code, or below it.
    *[
        (path, words, FAILED, "failed on this request: ")
        for path in (
            "asyncio:InvalidStateError",
            "builtins:AssertionError",
            "builtins:AttributeError",
            "builtins:BaseException",
            "builtins:Exception",
            "builtins:FileNotFoundError",
            "builtins:ImportError",
            "builtins:KeyError",
            "builtins:MemoryError",
            "builtins:OSError",
            "builtins:RecursionError",
            "builtins:RuntimeError",
            "builtins:StopIteration",
            "builtins:TimeoutError",
            "importlib.metadata:PackageNotFoundError",
            "queue:Empty",
            "torch:OutOfMemoryError",
            "PIL:UnidentifiedImageError",
            "mistral_common.exceptions:MistralCommonException",
        )
    ],
]
# Of libraries for audio, which this project's engine doesn't need and may lack; unexpected like any other error.
NOT_INSTALLED = {"LibsndfileError", "FFmpegError"}
UNUSABLE = {"EngineDeadError"}


def name(path):
    return path.partition(":")[2]


NAMES = {name(path) for path, *_ in CASES} | NOT_INSTALLED | UNUSABLE


def error_of(path, make):
    return make(resolve_name(path))


@pytest.mark.parametrize(("path", "make", "told", "said"), CASES, ids=[name(path) for path, *_ in CASES])
def test_every_error_has_its_status_reason_and_words(path, make, told, said):
    error = error_of(path, make)
    failure = translate(error)
    assert isinstance(failure, Failure)
    assert (failure.status_code, failure.reason, failure.param) == told
    assert said in failure.message and "\n" not in failure.message
    assert type(error).__name__ not in failure.message


@pytest.mark.parametrize(("path", "make", "told", "said"), CASES, ids=[name(path) for path, *_ in CASES])
def test_a_status_is_the_one_that_vllms_own_server_gives(path, make, told, said):
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    error = error_of(path, make)
    if isinstance(error, Exception):
        assert told[0] == create_error_response(error).error.code


def test_a_dead_engine_is_unusable_however_it_comes():
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    for error in (EngineDeadError(), wrapped(EngineGenerateError(), EngineDeadError(suppress_context=True))):
        found = translate(error)
        assert isinstance(found, EngineUnusable) and not isinstance(found, Failure)
        assert found.reason == "the engine's process has died"
    ours = EngineUnusable("no room")
    assert translate(ours) is ours


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_a_stop_of_the_whole_process_is_no_requests_failure(error):
    with pytest.raises(type(error)):
        translate(error)


# Nothing is missed.


@cache
def trees():
    """The parsed sources of SERVING, by path."""
    found = {}
    for part in SERVING:
        path = VLLM / part
        files = [path] if path.suffix else sorted(path.rglob("*.py"))
        assert files and path.exists(), f"vLLM has no {part} any more; look for where it went"
        found |= {file: ast.parse(file.read_text()) for file in files}
    return found


def error_names(tree):
    """Names of the classes that a module raises or catches; what it raises out of a variable has been raised before."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=named)) | ast.Raise(exc=named) | ast.ExceptHandler(type=named):
                for one in named.elts if isinstance(named, ast.Tuple) else [named] if named else []:
                    last = ast.unparse(one).rpartition(".")[2]
                    if last[0].isupper():
                        yield last


def descendants(cls):
    return {cls}.union(*(descendants(child) for child in cls.__subclasses__()))


def family(sources, roots):
    """Names of all classes in `sources` that descend from `roots`, whether or not their modules are ever imported."""
    parents = {}
    for source in sources:
        for child, bases in re.findall(r"^class (\w+)\(([^)]*)\)", source, re.MULTILINE):
            parents.setdefault(child, set()).update(base.rpartition(".")[2] for base in re.split(r"[\s,]+", bases))
    known = set(roots)
    while more := {child for child, bases in parents.items() if bases & known} - known:
        known |= more
    return known


def test_no_class_that_the_serving_layer_names_is_missing():
    named = {}
    for file, tree in trees().items():
        for error_name in error_names(tree):
            named.setdefault(error_name, file.relative_to(VLLM))
    assert {"VLLMValidationError", "GeneratorExit", "QueueOverflowError"} <= set(named)
    missing = {error_name: str(file) for error_name, file in named.items() if error_name not in NAMES}
    assert not missing, f"vLLM raises or catches errors that have no case here: {missing}"


def test_no_error_class_of_vllms_own_is_missing():
    import vllm.v1.engine.exceptions as engine_exceptions
    from vllm.exceptions import VLLMError

    found = {cls.__name__ for cls in descendants(VLLMError) if cls.__module__.startswith("vllm.")}
    found |= {key for key, value in vars(engine_exceptions).items() if isinstance(value, type)}
    found |= family((file.read_text() for file in VLLM.rglob("*.py")), {"VLLMError"})
    assert {"EngineGenerateError", "HTTPResponseSizeExceededError"} <= found
    assert not found - NAMES, f"vLLM has error classes that have no case here: {sorted(found - NAMES)}"


def test_a_new_class_would_be_noticed():
    source = (
        "class QuotaError(VLLMClientError): pass\nclass Other(dict): pass\nclass Deep(a.QuotaError,\n  Generic): pass\n"
    )
    assert family([source], {"VLLMClientError"}) == {"VLLMClientError", "QuotaError", "Deep"}
    source = "try:\n  raise a.New('x') from e\nexcept (Old, b.Rare):\n  raise\nexcept:\n  raise e.cause\nraise Plain"
    assert set(error_names(ast.parse(source))) == {"New", "Old", "Rare", "Plain"}


def test_a_class_that_is_not_listed_is_told_as_its_nearest_parent():
    from vllm.exceptions import LoRAAdapterNotFoundError, VLLMClientError

    class Quota(VLLMClientError, ValueError):
        pass

    class Adapter(LoRAAdapterNotFoundError):
        pass

    assert translate(Quota("too much")) == Failure(400, "invalid_request", "too much")
    assert translate(Adapter("a", "b")).reason == "unknown_adapter"


# Nobody is blamed for what is not his fault.


def wrapped(error, cause):
    error.__cause__ = cause
    return error


def test_what_generate_wraps_is_told_by_its_cause():
    from vllm.exceptions import QueueOverflowError, RetryableRequestError, VLLMValidationError
    from vllm.v1.engine.exceptions import EngineGenerateError

    for cause in (VLLMValidationError("no", parameter="n"), QueueOverflowError(), RetryableRequestError()):
        assert translate(wrapped(EngineGenerateError(), cause)) == translate(cause)
    twice = wrapped(EngineGenerateError(), wrapped(EngineGenerateError(), VLLMValidationError("no")))
    assert translate(twice) == Failure(400, "invalid_request", "no")


@pytest.mark.parametrize("kind", [ValueError, TypeError, OverflowError, KeyError, RuntimeError])
def test_a_broken_answer_loop_is_not_every_clients_mistake(kind):
    """vLLM hands one exception of that loop to all requests in flight, whatever they asked for."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineGenerateError
    from vllm.v1.engine.output_processor import RequestOutputCollector

    async def in_flight():
        queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r")
        queue.put(kind("bad shape"))
        try:
            await queue.get()
        except Exception as error:
            raise EngineGenerateError() from error

    with pytest.raises(EngineGenerateError) as caught:
        asyncio.run(in_flight())
    failure = translate(caught.value)
    assert (failure.status_code, failure.reason) == (500, "engine_error") and "bad shape" in failure.message


# Real refusals.


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "said"),
    [
        ("completion:Completion", {"prompt": "a", "max_tokens": "x"}, "max_tokens", "should be a valid integer"),
        ("completion:Completion", {"prompt": [1, "a"]}, "prompt[1]", "should be a valid integer"),
        (
            "completion:Completion",
            {"prompt": "a", "logit_bias": {"5": "x"}},
            "logit_bias.5",
            "should be a valid number",
        ),
        ("completion:Completion", {"prompt": ""}, "prompt", "non-empty"),
        ("completion:Completion", {"prompt": "a", "logprobs": -2}, "logprobs", "must be a positive value or -1"),
        (
            "chat_completion:ChatCompletion",
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "should be a valid string",
        ),
        (
            "chat_completion:ChatCompletion",
            {"messages": [], "response_format": {"type": "zzz"}},
            "response_format.type",
            "should be 'text'",
        ),
    ],
)
def test_a_body_that_vllm_refuses_names_the_field(endpoint, body, param, said):
    module, _, kind = endpoint.partition(":")
    request_class = resolve_name(f"vllm.entrypoints.openai.{module}.protocol:{kind}Request")
    with pytest.raises(Exception) as caught:
        request_class.model_validate(body)
    failure = translate(caught.value)
    assert (failure.status_code, failure.reason, failure.param) == (400, "invalid_request", param)
    assert said in failure.message and "parameter=" not in failure.message and "Value error" not in failure.message


@pytest.mark.parametrize("prompt", [[5] * 9, "a" * 1_000])
def test_a_long_prompt_is_one_kind_of_fault_in_tokens_and_in_characters(prompt):
    from types import SimpleNamespace

    from vllm.renderers.params import TokenizeParams

    params = TokenizeParams(max_total_tokens=8, max_output_tokens=0)
    tokenizer = SimpleNamespace(max_chars_per_token=10, truncation_side="right")
    check = params._token_len_check if isinstance(prompt, list) else params._text_len_check
    with pytest.raises(Exception) as caught:
        check(tokenizer, prompt)
    failure = translate(caught.value)
    assert (failure.status_code, failure.reason, failure.param) == (400, "prompt_too_long", "input_tokens")
    assert "maximum context length is 8 tokens" in failure.message


def test_a_value_too_long_to_print_is_still_told():
    from vllm.exceptions import VLLMValidationError

    error = VLLMValidationError("seed is out of range", parameter="seed", value=10**5_000)
    with pytest.raises(ValueError, match="digits"):
        str(error)
    assert translate(error) == Failure(400, "invalid_request", "seed is out of range", "seed")


# Returned bodies.


@pytest.mark.parametrize(
    ("code", "param", "told", "said"),
    [
        (400, "suffix", (400, "invalid_request", "suffix"), "some words"),
        (400, "input_tokens", (400, "prompt_too_long", "input_tokens"), "some words"),
        (404, "model", (404, "unknown_model", "model"), "some words"),
        (404, None, (404, "unknown_model", "model"), "some words"),
        (409, None, (409, "conflict", None), "some words"),
        (413, None, (413, "invalid_request", None), "some words"),
        (422, "image_url", (422, "unprocessable", "image_url"), "some words"),
        (429, None, (429, "overloaded", None), "some words"),
        (500, None, FAILED, "the engine failed on this request: some words"),
        (501, None, (501, "unsupported", None), "some words"),
        (502, None, (502, "engine_error", None), "the engine failed on this request: some words"),
        (503, None, BUSY, "some words"),
    ],
)
def test_a_returned_body_is_told_by_its_code(code, param, told, said):
    failure = translate_response(response("some words", code, param))
    assert (failure.status_code, failure.reason, failure.param) == told and failure.message == said


def response(message, code, param=None):
    from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

    return ErrorResponse(error=ErrorInfo(message=message, type="SomeError", code=code, param=param))


def test_a_model_that_is_not_served_is_told_as_vllm_returns_it():
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry

    registry = OpenAIModelRegistry(None, [BaseModelPath(name="served", model_path="x")])
    returned = asyncio.run(registry.check_model("nobody"))
    assert translate_response(returned) == Failure(404, "unknown_model", "The model `nobody` does not exist.", "model")


def test_a_cancelled_request_is_not_the_clients_mistake():
    from vllm.entrypoints.serve.engine.serving import BaseServing

    answers = [
        ast.unparse(returned.value)
        for file, tree in trees().items()
        if file.name == "serving.py" and "openai" in file.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type and ast.unparse(node.type) == "asyncio.CancelledError"
        for returned in ast.walk(node)
        if isinstance(returned, ast.Return)
    ]
    assert len(answers) == 2, "the completion handler and the chat handler each swallow a cancellation"
    for answer in answers:
        assert answer.startswith("self.create_error_response(")
        returned = BaseServing.create_error_response(*ast.literal_eval(f"({answer.partition('(')[2][:-1]},)"))
        assert returned.error.code == 400
        assert translate_response(returned) == ABORTED
    assert (ABORTED.status_code, ABORTED.reason) == (500, "aborted")
    # The same words of another status or about a field are somebody's own.
    assert translate_response(response("Client disconnected", 503)).reason == "overloaded"


# Messages.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n  lines\tof words ", "two lines of words"),
        ("no adapter in /data/adapters/sql-7b/v2 here", "no adapter in <path> here"),
        ("can't open '/home/ann/.cache/hub/x.json'", "can't open '<path>'"),
        (" " * 5_000 + "late words", "late words"),
        ("failed:/data/sql/v2", "failed:<path>"),
        ("see https://example.com/a/b.", "see https://example.com/a/b."),
        ('at File "/a/b.py", line 3, in run: no', "at : no"),
        ("can't open file:///etc/passwd now", "can't open <path> now"),
        ("and/or application/json, POST /v1/completions", "and/or application/json, POST /v1/completions"),
        ("<Grammar object at 0x7f00aa> is bad", "<Grammar object> is bad"),
        ("[12:01:02] /src/cpp/grammar.cc:123: EBNF parse error", "EBNF parse error"),
        ('Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\n    g()\nValueError: too big', "too big"),
        ('It failed:\nTraceback (most recent call last):\n  File "/a/b.py", line 3, in f\nKeyError: 1', "It failed"),
        ("Traceback (most recent call last):", ""),
    ],
)
def test_a_message_is_one_line_and_says_nothing_of_this_machine(text, shown):
    assert one_line(text) == shown


def test_a_message_is_bounded():
    from vllm.exceptions import VLLMValidationError

    for error in (RuntimeError("word " * 10_000), VLLMValidationError("/a" * 1_000_000), ValueError("x" * 10_000)):
        assert 0 < len(translate(error).message) <= MAX_MESSAGE_CHARS
    assert len(translate_response(response("b" * 5_000, 500)).message) == MAX_MESSAGE_CHARS


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["/a", "x/a", "a/", "/home/", " ", "\n ", '"File "', "[12:", "//", "-/"])
def test_a_long_text_is_not_cleaned_for_ever(piece):
    """A client chooses much of what is told, and the loop that cleans it answers everybody else, too."""
    shown = {one_line(piece * 100_000) for _ in range(1_000)}
    assert len(shown) == 1 and len(shown.pop()) <= MAX_MESSAGE_CHARS


def test_the_module_is_light_until_it_is_needed():
    code = "import sys, pipelines.translation; print(sorted({'vllm', 'torch', 'jinja2', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
