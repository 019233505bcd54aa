"""How long an answer is going to be, learned from those that ended: the estimate behind shortest job first.

Called by ``arrivals``. One moving average for each class of requests: powers of two of the prompt's length
and of the most that was asked for. That separates chat from summaries and one-word answers from essays, and
needs no model. Deterministic, a few hundred numbers at most.
"""

_WEIGHT = 0.1  # of the newest answer
_Class = tuple[int, int]


class AnswerLengths:
    """Exponentially weighted averages of answer lengths, in tokens."""

    def __init__(self) -> None:
        self._averages: dict[_Class, float] = {}
        self._overall: float | None = None

    def expect(self, num_prompt_tokens: int, max_tokens: int) -> float:
        """Tokens that such a request is expected to produce; as long as nothing is known, all it may."""
        known = self._averages.get(_class_of(num_prompt_tokens, max_tokens), self._overall)
        return float(max_tokens) if known is None else min(known, float(max_tokens))

    def learn(self, num_prompt_tokens: int, max_tokens: int, length: int) -> None:
        """An answer ended by itself."""
        kind = _class_of(num_prompt_tokens, max_tokens)
        self._averages[kind] = _moved(self._averages.get(kind), length)
        self._overall = _moved(self._overall, length)


def _class_of(num_prompt_tokens: int, max_tokens: int) -> _Class:
    return num_prompt_tokens.bit_length(), max_tokens.bit_length()


def _moved(average: float | None, length: int) -> float:
    return float(length) if average is None else average + _WEIGHT * (length - average)
