"""The task of each client of tools, in two steps: a call that has to be made, of a model that cannot choose,
and an answer to its result. The arguments are the model's, by their schema.
"""

import json
import sys
from typing import Literal

from pydantic import BaseModel

QUESTION = "How is the weather?"
City = Literal["Oslo", "Rome"]


class Weather(BaseModel):
    """The weather of a city."""

    city: City


class Report(BaseModel):
    """An answer of a type."""

    sky: Literal["clear", "cloudy"]
    degrees: Literal[1, 2, 3]


def main(program):
    """Run it with the arguments URL MODEL, and print its results as JSON."""
    url, name = sys.argv[1:]
    sys.stdout.write(json.dumps(program(f"{url}/v1", name)))
