"""Read: input files to lines, as bytes with their place. Nothing is interpreted here.

Makes the rows of `tables.LINES`. A line ends with 0x0A; blank lines are no rows but count as lines.
"""

import gzip
import hashlib
import heapq
import io
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any, cast

import pyarrow as pa
from fsspec.implementations.local import LocalFileOpener

from pipelines.inputs import InputFile
from pipelines.storage import explain, is_remote, is_stores, open_store
from schemas import tables
from schemas.failures import StorageFailed, UsageError

MAX_LINE_BYTES = 64 << 20
# A larger file is read in slices of this size, side by side.
SLICE_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# How files begin that hold no lines of text, and what to do about them.
_OTHER_FORMS = {
    b"PAR1": "is a Parquet file; write its rows as JSON lines",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"BZh": "is packed by bzip2; unpack it, or pack it by gzip or zstd",
    b"\xfd7zXZ": "is packed by xz; unpack it, or pack it by gzip or zstd",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
}


@dataclass(frozen=True, slots=True)
class Slice:
    """The lines of a file that begin in its bytes from `start` to `end` (None: its end).

    `lines_before`: how many line feeds stand before byte `start - 1`.
    """

    file: InputFile
    start: int = 0
    end: int | None = None
    lines_before: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines of a run's input are taken: the first `limit`, or `sample` by chance (the same ones each time)."""

    limit: int | None = None
    sample: int | None = None


ALL = Selection()


def lines(files: list[InputFile], selection: Selection = ALL) -> Any:
    """A Ray dataset of `tables.LINES`: one task a slice of a file, in blocks in the file's order."""
    if selection.limit is not None:
        # One task: the first lines are those of the first files.
        return _dataset([{"slices": [asdict(Slice(file)) for file in files]}], limit=selection.limit)
    items = [{"slices": [asdict(piece)]} for file in files for piece in slices(file)]
    if selection.sample is None:
        return _dataset(items)
    keys = _dataset(items).map_batches(SmallestKeys(selection.sample), batch_format="pyarrow", batch_size=None)
    smallest = heapq.nsmallest(selection.sample, (row["key"] for row in keys.iter_rows()))
    return _dataset(items, last_key=smallest[-1] if smallest else "")


def _dataset(items: list[dict[str, Any]], **options: Any) -> Any:
    import ray.data

    return ray.data.from_items(items, override_num_blocks=max(1, len(items))).map_batches(
        Reader(**options), batch_format="pyarrow", batch_size=1, zero_copy_batch=True
    )


def slices(file: InputFile, slice_bytes: int = SLICE_BYTES) -> list[Slice]:
    """A large file cut into pieces that can be read side by side: where it isn't packed, and stands on a disk.

    An object store's file is read once, from its start: line numbers need what comes before a slice counted, and that
    would be a second transfer.
    """
    if is_remote(file.uri) or file.size_bytes <= slice_bytes:
        return [Slice(file)]
    fs, path = open_store(file.uri)
    pieces, before = [], 0
    with fs.open(path, "rb") as stream:
        if stream.read(4).startswith((_GZIP, _ZSTD)):
            return [Slice(file)]
        for start in range(0, file.size_bytes, slice_bytes):
            pieces.append(Slice(file, start, min(start + slice_bytes, file.size_bytes), before))
            stream.seek(max(0, start - 1))
            before += _count_lines(stream, slice_bytes - (start == 0))
    return pieces


def _count_lines(stream: IO[bytes], num_bytes: int) -> int:
    number = 0
    while num_bytes > 0 and (piece := stream.read(min(num_bytes, 1 << 20))):
        number += piece.count(b"\n")
        num_bytes -= len(piece)
    return number


@dataclass(frozen=True)
class Reader:
    """The lines of the slices that a batch of rows describes; of these, those that are taken."""

    limit: int | None = None
    last_key: str | None = None

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        left = self.limit
        for item in batch.to_pylist():
            for packed in item["slices"]:
                piece = Slice(**{**packed, "file": InputFile(**packed["file"])})
                for block in read_slice(piece):
                    taken = block if self.last_key is None else _select(block, self.last_key)
                    if left is not None:
                        taken = taken.slice(0, left)
                        left -= taken.num_rows
                    yield taken
                    if left == 0:
                        return


def _select(block: pa.Table, last_key: str) -> pa.Table:
    """The sampled rows; a fault of a whole file is kept whatever the sample."""
    return block.filter(pa.array([key is None or key <= last_key for key in _keys(block)], pa.bool_()))


@dataclass(frozen=True)
class SmallestKeys:
    """The smallest keys of a block: the sample of the whole is among those of its blocks."""

    number: int

    def __call__(self, block: pa.Table) -> pa.Table:
        keys = (key for key in _keys(block) if key is not None)
        return pa.table({"key": pa.array(heapq.nsmallest(self.number, keys), pa.string())})


def _keys(block: pa.Table) -> Iterator[str | None]:
    """For each row a number that its place decides, as if by chance."""
    places = zip(block["source_index"].to_pylist(), block["source_line"].to_pylist(), strict=True)
    for index, line in places:
        yield None if line is None else hashlib.blake2b(f"{index}:{line}".encode(), digest_size=12).hexdigest()


# --- one slice ------------------------------------------------------------------------------------------------------


def read_file(file: InputFile, block_bytes: int = tables.BLOCK_BYTES) -> Iterator[pa.Table]:
    """The lines of one file: `read_slice` of all of it."""
    return read_slice(Slice(file), block_bytes)


def read_slice(piece: Slice, block_bytes: int = tables.BLOCK_BYTES) -> Iterator[pa.Table]:
    """The lines of one slice as blocks of `tables.LINES`, without their line ends.

    A row with a `reason` is a fault: a line that is too long (its beginning is kept), or, without a line, a file that
    breaks off (a truncated archive; what was read before stands) or holds no lines of JSON. Raises StorageFailed where
    the store fails: what it doesn't give now it may give the next time.
    """
    file, number = piece.file, piece.lines_before
    block = _Block(file)
    try:
        fs, path = open_store(file.uri)
        with fs.open(path, "rb") as raw, _decompress(raw) as stream:
            rows = _lines(stream, piece)
            if piece.start == 0:
                rows, fault = _look(rows)
                if fault is not None:
                    block.add(None, None, None, "not_jsonl", f"{file.name}: {fault}")
            for number, offset, line, is_whole in rows:
                if is_whole:
                    block.add(number, offset, line)
                else:
                    message = f"is longer than {MAX_LINE_BYTES >> 20} MiB, the most that a line may have. Shorten it"
                    block.add(number, offset, line[: tables.RAW_BYTES], "line_too_long", message)
                if block.num_bytes >= block_bytes:
                    yield block.take()
    except UsageError as error:  # a store that can't even be opened
        raise StorageFailed(str(error)) from error
    except Exception as error:  # each store and each codec has exceptions of its own
        if is_stores(error):
            raise StorageFailed(f"{file.name}: can't be read beyond line {number} ({explain(error)})") from error
        message = f"{file.name}: breaks off after line {number} ({explain(error)}); get the whole file"
        block.add(None, None, None, "unreadable_file", message)
    yield block.take()


class _Block:
    """Rows of `tables.LINES` that gather, by column."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._rows: list[tuple[int | None, int | None, bytes | None, str | None, str | None]] = []
        self.num_bytes = 0

    def add(
        self,
        number: int | None,
        offset: int | None,
        line: bytes | None,
        reason: str | None = None,
        message: str | None = None,
    ) -> None:
        self._rows.append((number, offset, line, reason, message))
        self.num_bytes += len(line or b"")

    def take(self) -> pa.Table:
        rows, self._rows, self.num_bytes = self._rows, [], 0
        if not rows:
            return tables.LINES.empty_table()
        numbers, offsets, texts, reasons, messages = zip(*rows, strict=True)
        columns = [[self._file.index] * len(rows), [self._file.name] * len(rows), numbers, offsets, texts]
        columns += [reasons, messages]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, tables.LINES.types, strict=True)]
        return pa.Table.from_arrays(arrays, schema=tables.LINES)


# Number, byte offset and text of a line, and whether that is all of it.
_Row = tuple[int, int, bytes, bool]


def _lines(stream: IO[bytes], piece: Slice) -> Iterator[_Row]:
    """The lines of a slice that aren't blank."""
    offset, number = piece.start, piece.lines_before
    if piece.start:
        # The line that begins before this slice belongs to the one before.
        stream.seek(piece.start - 1)
        offset += _skip_line(stream) - 1
        number += 1
    readline = stream.readline
    while (piece.end is None or offset < piece.end) and (line := readline(MAX_LINE_BYTES + 2)):
        number += 1
        start, offset = offset, offset + len(line)
        is_whole = True
        text = line.rstrip(b"\r\n")
        if len(text) > MAX_LINE_BYTES:
            is_whole = False
            if not line.endswith(b"\n"):
                offset += _skip_line(stream)
        if number == 1:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        if text and not text.isspace():
            yield number, start, text, is_whole


def _skip_line(stream: IO[bytes]) -> int:
    """Go past the next line feed; bytes passed. Holds little of the line, however long it is."""
    passed = 0
    while piece := stream.readline(1 << 20):
        passed += len(piece)
        if piece.endswith(b"\n"):
            break
    return passed


def _decompress(raw: IO[bytes]) -> IO[bytes]:
    """The stream unpacked, by what its first bytes say rather than by its name."""
    if not isinstance(raw, LocalFileOpener):
        # The files of an object store read lines of any length alone.
        raw = cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", raw), 1 << 20))
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(_GZIP):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if magic == _ZSTD:
        return cast("IO[bytes]", io.BufferedReader(pa.input_stream(raw, compression="zstd"), 1 << 20))
    return raw


def _look(rows: Iterator[_Row]) -> tuple[Iterator[_Row], str | None]:
    """The rows of a file, or none of them and why: it holds something else than a JSON object a line, by its looks.

    Rows are never guessed from fragments: a file that is one array, or objects over several lines, is refused whole.
    """
    first = next(rows, None)
    if first is None:
        return iter(()), None
    head = first[2]
    for magic, words in _OTHER_FORMS.items():
        if head.startswith(magic):
            return iter(()), words
    begun, form, filter_ = [first], "", ".[]"
    if head in (b"[", b"[{") or (head.startswith(b"[") and head.endswith(b",")):
        form = "one array over its lines"
    elif head == b"{":
        form, filter_ = "objects over several lines", "."
    elif head.startswith(b"[") and head[1:].lstrip().startswith(b"{"):
        begun += itertools.islice(rows, 1)
        form = "one array" if len(begun) == 1 else ""
    if not form:
        return itertools.chain(begun, rows), None
    how = f"jq -c '{filter_}' FILE > FILE.jsonl"
    return iter(()), f"holds {form}, expected one JSON object on each line. Convert it: {how}"
