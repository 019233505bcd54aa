"""Tokens per second of engines that take turns, by kind of step (used by ``bench.tensor_parallel`` and
``bench.cpu_kernels``). Knows engines only by name, and not what distinguishes them.
"""

import os
import statistics
import sys
from collections.abc import Mapping

from bench.engine_processes import EngineProcesses

NEW_TOKENS, PROMPT = 33, 32
DECODES, PREFILL = (1, 8, 32), 512
#: Column -> (prompt tokens, requests).
COLUMNS = {f"decode x{count}": (PROMPT, count) for count in DECODES} | {f"prefill {PREFILL}": (PREFILL, 1)}
HEAD = "tokens per second: median step (fastest step)"


class Rates:
    """Tokens per second of one engine and kind of step: of the median step of each round, and of the fastest
    of all steps.
    """

    def __init__(self) -> None:
        self.rounds = list[float]()
        self.best = 0.0

    def add(self, tokens: int, seconds: list[float]) -> None:
        """The steps of a round."""
        self.rounds.append(tokens / statistics.median(seconds))
        self.best = max(self.best, tokens / min(seconds))

    def __str__(self) -> str:
        return f"{statistics.median(self.rounds):.0f} ({self.best:.0f})"


def rates(engines: Mapping[str, EngineProcesses], rounds: int) -> tuple[dict[str, dict[str, Rates]], str]:
    """By engine and column, measured in turns, and a note of the load that the machine had meanwhile."""
    found = {name: {column: Rates() for column in COLUMNS} for name in engines}
    loads = [os.getloadavg()[0]]
    for number in range(rounds):
        for column, (length, count) in COLUMNS.items():
            is_prefill = length == PREFILL
            for name, engine in engines.items():
                new_tokens = 2 if is_prefill else NEW_TOKENS
                prefill, *steps = (step["seconds"] for step in engine.run(length, count, new_tokens))
                found[name][column].add(length if is_prefill else count, [prefill] if is_prefill else steps)
        loads.append(os.getloadavg()[0])
        print(f"round {number}: load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    return found, f"Load average in the rounds: {min(loads):.1f} to {max(loads):.1f}."


def rows(found: Mapping[str, Mapping[str, Rates]]) -> list[list[str]]:
    """A row for each engine."""
    return [[name, *map(str, columns.values())] for name, columns in found.items()]
