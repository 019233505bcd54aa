"""What a parser finds in an answer, in order: a thought, text, and of each call its name and then its
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallName:
    """A call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that began last, as JSON."""

    text: str


Piece = Reasoning | Text | CallName | Arguments
