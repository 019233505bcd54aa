"""The cost of grammar masks in a step, without the model: by kind of grammar and number of rows (a section of
``bench.cpu``). Tokens are drawn at random from those allowed, so that grammars are walked through.
"""

import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from quire_server.core.sampling_params import Grammar, GrammarKind, SamplingParams
from quire_server.core.step import StartedRow
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.structured_outputs import Grammars
from quire_server.text import grammar as texts
from quire_server.text.tokenizer import Tokenizer

ROWS, STEPS = (1, 8, 32), 120
LENGTH = 200
_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "ok": {"type": "boolean"},
        "note": {"type": "string"},
    },
    "required": ["name", "age", "tags", "ok", "note"],
    "additionalProperties": False,
}
#: Of answers that do not end within the lengths of the benches.
LIST_SCHEMA = json.dumps({"type": "array", "items": _OBJECT, "minItems": 50})
FORMS = {
    "a JSON object of five fields": (GrammarKind.JSON, json.dumps(_OBJECT)),
    "any JSON object": (GrammarKind.JSON, '{"type": "object"}'),
    "an expression": (GrammarKind.REGEX, r"[A-Z][a-z]{3,20}( [a-z]{1,12}){4,40}\."),
    "an EBNF": (GrammarKind.GRAMMAR, 'root ::= term (" + " term)*\nterm ::= [0-9]+ | "(" root ")"'),
}


class Walk:
    """Rows that follow one grammar, and start again when it has ended."""

    def __init__(self, vocabulary: texts.Vocabulary, form: Grammar, num_rows: int) -> None:
        self._grammars = Grammars(lambda: vocabulary)
        self._form = form
        self._vocabulary = vocabulary
        self._input_batch = InputBatch(num_rows, LENGTH, 16)
        self._lengths = np.ones(num_rows, np.int64)
        for row in range(num_rows):
            self._begin(row)

    def step(self) -> float:
        """Seconds that the masks of one step took."""
        row_ids = np.arange(len(self._lengths))
        logits = torch.randn(len(row_ids), len(self._vocabulary.tokens))
        began_at = time.perf_counter()
        failures = self._grammars.constrain(
            logits, self._input_batch, row_ids, self._lengths, self._vocabulary.eos_token_ids
        )
        seconds = time.perf_counter() - began_at
        assert not failures
        for row, token in enumerate(logits.argmax(-1).tolist()):
            self._input_batch.tokens[row, self._lengths[row]] = token
            self._lengths[row] += 1
            if token in self._vocabulary.eos_token_ids or self._lengths[row] == LENGTH:
                self._begin(row)
        return seconds

    def _begin(self, row: int) -> None:
        sampling = SamplingParams(LENGTH, grammar=self._form)
        self._grammars.admit(str(row), self._grammars.build(self._form))
        self._input_batch._start(StartedRow(row, str(row), (1,), 1, (0,), sampling, 0))
        self._lengths[row] = 1


def table(directory: Path, steps: int = STEPS) -> str:
    """Medians and 99th percentiles."""
    tokenizer = Tokenizer.load(directory)
    vocabulary = texts.Vocabulary.of(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
    lines = [
        "| form | " + " | ".join(f"{rows} rows, us | 99 %" for rows in ROWS) + " |",
        "|---|" + "---:|" * 2 * len(ROWS),
    ]
    for name, (kind, text) in FORMS.items():
        cells = []
        for rows in ROWS:
            walk = Walk(vocabulary, Grammar(kind, texts.compiled(kind, text)), rows)
            taken = sorted(1e6 * walk.step() for _ in range(steps))
            cells += [f"{statistics.median(taken):.0f}", f"{taken[int(0.99 * len(taken))]:.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
