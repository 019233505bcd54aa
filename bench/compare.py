"""Compares engines by alternating their runs, so that a disturbance of the machine affects all of them. Knows
engines only by name.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from bench.baselines import Engine
from bench.engine import prompts

REPEATS = 3
OURS, THEIRS, BEST_OF = "quire auto", "transformers", "llama.cpp"
Maker = Callable[[int], Engine]  # from the number of streams


def kept(engine: Engine) -> Maker:
    """The same engine for any number of streams."""
    return lambda streams: engine


class Comparison:
    """Tokens per second of each engine, as columns: the median of the runs' medians, and the fastest step."""

    def __init__(self, makers: Mapping[str, Maker], vocab_size: int) -> None:
        self._makers, self._vocab_size = makers, vocab_size
        self._columns: dict[str, dict[str, tuple[float, float]]] = {}

    def decode(self, length: int, streams: tuple[int, ...], new_tokens: int, repeats: int = REPEATS) -> str:
        """All streams with prompts of the same length, separately for each number of streams."""
        for count in streams:
            batch = prompts(count, count, length, self._vocab_size)
            seconds: dict[str, list[list[float]]] = {name: [] for name in self._makers}
            with self._engines(count) as engines:
                for _ in range(repeats):
                    for name, engine in engines.items():
                        _, steps = engine.run(batch, [new_tokens] * count)
                        seconds[name].append([taken for _, taken in steps])
            self._add(f"x{count}", count, seconds)
        return self._table()

    def rates(self, streams: int, name: str) -> tuple[float, float]:
        """Of an engine whose decoding with so many streams was compared: by the median, and by the fastest
        step.
        """
        return self._columns[f"x{streams}"][name]

    def decode_leaving(
        self, length: int, streams: tuple[int, ...], steps_each: int, repeats: int = REPEATS
    ) -> str:
        """One prefill: all streams take ``steps_each`` steps, then some leave, down to the least: what is
        measured at fewer streams has seen some more tokens.
        """
        order = sorted(streams)
        answers = [1 + steps_each * sum(index < count for count in order) for index in range(order[-1])]
        batch = prompts(order[-1], order[-1], length, self._vocab_size)
        taken: dict[int, dict[str, list[list[float]]]] = {
            count: {name: [] for name in self._makers} for count in order
        }
        for name in [*self._makers] * repeats:
            with self._engines(order[-1], [name]) as engines:
                _, steps = engines[name].run(batch, answers)
            for count in order:
                taken[count][name].append([seconds for rows, seconds in steps if rows == count])
            print(f"{length} tokens: {name}", file=sys.stderr, flush=True)
        for count in order:
            self._add(f"x{count}", count, taken[count])
        return self._table()

    def prefill(self, lengths: tuple[int, ...]) -> str:
        """Prompt tokens per second of one prompt."""
        with self._engines(1) as engines:
            for length in lengths:
                batch = prompts(length, 1, length, self._vocab_size)
                seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
                for _ in range(REPEATS):
                    for name, engine in engines.items():
                        seconds[name].append([engine.run(batch, [2])[0]])
                self._add(f"{length} tokens", length, seconds)
        return self._table()

    @contextmanager
    def _engines(self, streams: int, names: list[str] | None = None) -> Iterator[dict[str, Engine]]:
        engines = {name: self._makers[name](streams) for name in names or self._makers}
        try:
            yield engines
        finally:
            for engine in engines.values():
                engine.close()

    def _add(self, head: str, tokens: int, seconds: dict[str, list[list[float]]]) -> None:
        self._columns[head] = {
            name: (
                tokens / statistics.median(statistics.median(run) for run in runs),
                tokens / min(min(run) for run in runs),
            )
            for name, runs in seconds.items()
        }
        for name, (rate, best) in self._columns[head].items():
            print(f"{head} {name}: {rate:.0f} tok/s, best {best:.0f}", file=sys.stderr, flush=True)

    def _table(self) -> str:
        columns = self._columns.values()
        rows = [
            [name, *(f"{rate:.0f} ({best:.0f})" for rate, best in (column[name] for column in columns))]
            for name in self._makers
        ]
        for title, prefix, digits in ((THEIRS, THEIRS, 1), (f"best {BEST_OF}", BEST_OF, 2)):
            if not any(name.startswith(prefix) for name in self._makers):
                continue
            best = [max(c[name][0] for name in c if name.startswith(prefix)) for c in columns]
            for ours in (name for name in self._makers if name.startswith(OURS)):
                ratios = [column[ours][0] / rate for column, rate in zip(columns, best, strict=True)]
                title_ours = ours.removeprefix(OURS).strip()
                rows.append([f"{title_ours} / {title}", *(f"{ratio:.{digits}f}x" for ratio in ratios)])
        return table(["tok/s: median (best step)", *self._columns], rows)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with numbers aligned to the right."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
