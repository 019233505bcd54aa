"""From an input file to the lines of a batch, and from what came of them to its output files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quire_batch import objects
from quire_batch.contents import Contents
from quire_batch.lines import Line, LineError, parse, split
from quire_batch.records import UNANSWERED, Batch, File, LineState, Result, Status
from quire_batch.space import RUNNING, Space
from quire_batch.store import Store

_MAX_ERRORS = 100  # that are said of one file
_OUTPUT = (LineState.DONE,)
_ERRORS = tuple(state for state in LineState if state is not LineState.DONE)
OUTPUT_PURPOSE = "batch_output"


class InvalidFileError(Exception):
    """A file is no list of requests. ``errors``: in OpenAI's form."""

    def __init__(self, errors: list[Mapping[str, Any]]) -> None:
        super().__init__(f"{len(errors)} errors")
        self.errors = errors


class LostBatchError(Exception):
    """The lines of a batch are not there any more: another worker has finalized it."""


def requests(parts: Iterable[bytes], endpoint: str, most: int) -> Iterator[Line]:
    """The lines of a file. Raises InvalidFileError at its end, or once there are more lines than ``most``."""
    errors: list[Mapping[str, Any]] = []
    seen: dict[str, int] = {}
    number = 0
    for number, data in split(parts):
        try:
            if len(seen) + len(errors) >= most:
                raise LineError("too_many_requests", f"The file has more than {most} lines.")
            line = parse(number, data, endpoint)
            if (first := seen.setdefault(line.custom_id, number)) != number:
                message = f"The custom_id is that of line {first}, too: each is for one line."
                raise LineError("duplicate_custom_id", message, "custom_id")
        except LineError as error:
            errors.append(error_of(error, number))
            if len(errors) >= _MAX_ERRORS or error.code == "too_many_requests":
                break
        else:
            if not errors:
                yield line
    if not number:
        errors.append(error_of(LineError("empty_file", "The file has no line."), None))
    if errors:
        raise InvalidFileError(errors)


def error_of(error: LineError, number: int | None) -> Mapping[str, Any]:
    """OpenAI's error of a line."""
    text = f"{error.param}: {error}" if error.param else str(error)
    return {"code": error.code, "line": number, "message": text, "param": error.param}


def write_results(
    batch: Batch, store: Store, contents: Contents, space: Space, now: float
) -> dict[str, File]:
    """The output and the error file, those that are not empty, by the column that names them. Their ids are
    the batch's, so that to write them again after a crash leaves nothing behind. Lines without an answer are
    those that the batch's end has left. Raises LostBatchError, and then the files that were there stay.
    """
    written = {}
    left = LineState.CANCELLED if batch.status is Status.CANCELLING else LineState.EXPIRED
    outputs = ("output", _OUTPUT, batch.completed), ("error", _ERRORS, batch.total - batch.completed)
    for kind, states, number in outputs:
        if not number:
            continue
        id_ = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        results = (_ended(one, left) for one in store.results(batch.id, states))
        lines = _output(batch.id, results, number)
        written[f"{kind}_file_id"] = File(
            id=id_,
            owner=batch.owner,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=OUTPUT_PURPOSE,
            bytes=contents.write(id_, space.guarded(RUNNING, lines, len)),
            created_at=int(now),
        )
    return written


def _ended(result: Result, left: LineState) -> Result:
    return replace(result, state=left) if result.state in UNANSWERED else result


def _output(batch_id: str, results: Iterable[Result], number: int) -> Iterator[bytes]:
    """So many lines, or LostBatchError."""
    found = 0
    for result in results:
        yield objects.output_line(batch_id, result)
        found += 1
    if found != number:
        raise LostBatchError(f"{found} lines of {number}")
