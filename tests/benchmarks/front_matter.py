"""What a line costs before an engine: CPU time a row of parsing and judging, of reading, counting tokens and spooling.

- ours: strict JSON, the line's shape, the JSON Schema and the rules with a model's limits: `parse_strict`, `recognise`,
  `check_body`;
- peer: the standard library's `json.loads`, and `jsonschema` with the same schema, its validator made once.

Work: a mix of completions and chats of 200 to 2,000 bytes with the usual fields, each of which both accept. Reading,
counting and spooling have no peer. `overnight check` of a large file is watched for its memory.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from tests.benchmarks.report import Figure, report  # noqa: E402 - found below the root

WORDS = "the river wind stone letter garden night bread paper market winter door road voice light water"
NUM_LINES, NUM_QUICK = 200_000, 20_000
LARGE_BYTES, LARGE_QUICK = 2_000_000_000, 200_000_000
MODEL = "smollm2-135m-instruct"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def make_lines(number: int) -> list[bytes]:
    """Lines of a JSONL file, the same for the same number."""
    draw = random.Random(number)  # noqa: S311 - work to repeat, not a secret
    schema = {"type": "object", "properties": {"label": {"enum": ["a", "b"]}}, "required": ["label"]}
    lines = []
    for index in range(number):
        text = " ".join(draw.choices(WORDS.split(), k=draw.randint(20, 320)))
        body: dict[str, Any] = {"model": MODEL, "max_tokens": draw.randint(16, 512), "temperature": 0.7}
        if index % 2:
            system = {"role": "system", "content": "Answer in one sentence."}
            body |= {"messages": [system, {"role": "user", "content": text}], "top_p": 0.9}
        else:
            body |= {"prompt": text, "seed": index, "stop": ["\n\n"], "request_id": f"row-{index}"}
        if index % 5 == 0:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        if index % 7 == 0:
            body |= {"logprobs": True, "top_logprobs": 3} if index % 2 else {"logprobs": 3}
        lines.append(json.dumps(body).encode())
    return lines


def cpu_us(work: Callable[[], object], number: int) -> float:
    """Microseconds of CPU time a row."""
    started = time.process_time()
    work()
    return (time.process_time() - started) / number * 1e6


def judge(lines: list[bytes], limits: Any) -> None:
    from schemas.contract import check_body, parse_strict
    from schemas.rules import Judge
    from schemas.shapes import recognise

    judge = Judge("batch", limits)
    for line in lines:
        shaped = recognise(parse_strict(line))
        assert check_body(shaped.body, shaped.endpoint, judge) is None


def judge_as_peer(lines: list[bytes]) -> None:
    from jsonschema import Draft202012Validator

    from schemas.contract import SCHEMA_FILES

    completion, chat = (
        Draft202012Validator(json.loads((ROOT / "schemas" / SCHEMA_FILES[endpoint]).read_text()))
        for endpoint in ENDPOINTS
    )
    for line in lines:
        body = json.loads(line)
        assert (chat if "messages" in body else completion).is_valid(body)


def measure_stages(lines: list[bytes], limits: Any, model: str, folder: Path) -> dict[str, float]:
    """CPU time a row of what comes beside parsing and judging."""
    from pipelines.checks import Checks
    from pipelines.inputs import find_inputs
    from pipelines.plan import SpoolWriter, WithKey, chunk_size
    from pipelines.read import read_file
    from pipelines.storage import Folder
    from pipelines.tokens import PromptCounter
    from pipelines.validate import Validator
    from schemas.shapes import recognise

    path = folder / "lines.jsonl"
    path.write_bytes(b"\n".join(lines))
    file = find_inputs((str(path),))[0]
    counter = PromptCounter(model, limits)
    shaped = [recognise(json.loads(line)) for line in lines]
    counter.count(shaped[0].body, shaped[0].endpoint)
    counter.count(shaped[1].body, shaped[1].endpoint)
    checked = [Validator(Checks("batch"))(block) for block in read_file(file)]
    spool = SpoolWriter(Folder.at(str(folder / "work")), chunk_size(len(lines), 1, 384))
    return {
        "read": cpu_us(lambda: list(read_file(file)), len(lines)),
        "count tokens": cpu_us(lambda: [counter.count(one.body, one.endpoint) for one in shaped], len(lines)),
        "spool": cpu_us(lambda: [list(spool(WithKey(None)(block))) for block in checked], len(lines)),
    }


def measure_memory(lines: list[bytes], folder: Path, num_bytes: int) -> dict[str, float]:
    """Peak memory in GiB of the largest process of `overnight check` over a file of so many bytes.

    All that is resident, and what is its own: Ray's object store is shared, and resident in each process that reads it.
    """
    path = folder / "large.jsonl"
    block = b"\n".join(lines[:5_000]) + b"\n"
    with path.open("wb") as stream:
        while stream.tell() < num_bytes:
            stream.write(block)
    command = [sys.executable, "jobs/check.py", "--input", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        root, resident, own = psutil.Process(running.pid), 0, 0
        while running.poll() is None:
            for process in [root, *root.children(recursive=True)]:
                try:
                    memory = process.memory_full_info()
                except psutil.Error:
                    continue
                resident, own = max(resident, memory.rss), max(own, memory.uss)
            time.sleep(0.5)
    assert running.returncode == 0
    return {"resident": resident / 2**30, "its own": own / 2**30}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less work and one round.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of both sides.")] = 3,
    memory: Annotated[bool, typer.Option(help="Whether a large file is checked, too.")] = True,
) -> None:
    """CPU time a row before an engine, and the memory of a check."""
    from pipelines.limits import read_limits
    from pipelines.model import resolve
    from schemas.settings import EngineSettings

    model = resolve(None)
    limits = read_limits(model, (), EngineSettings())
    lines = make_lines(NUM_QUICK if quick else NUM_LINES)
    ours, theirs, stages = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1 if quick else rounds):
            sides = [
                lambda: ours.append(cpu_us(lambda: judge(lines, limits), len(lines))),
                lambda: theirs.append(cpu_us(lambda: judge_as_peer(lines), len(lines))),
            ]
            for side in sides if number % 2 == 0 else reversed(sides):
                side()
            folder = Path(scratch) / str(number)
            folder.mkdir()
            stages.append(measure_stages(lines[:NUM_QUICK], limits, model.path, folder))
        figures = [Figure("parse and judge / json and jsonschema", ours, theirs, aim=1 / 20, unit="us CPU a row")]
        figures += [Figure(name, [stage[name] for stage in stages], [], None, "us CPU a row") for name in stages[0]]
        if memory:
            peaks = measure_memory(lines, Path(scratch), LARGE_QUICK if quick else LARGE_BYTES)
            figures += [Figure(f"check: largest process, {name}", [peak], [], 1, "GiB") for name, peak in peaks.items()]
    report(figures, json_file)


if __name__ == "__main__":
    typer.run(main)
