"""The command lines of ``quire-server quantize`` and ``quire-server eval-quality``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quire_server.evaluate import perplexity
from quire_server.quantize import run
from quire_server.quantize.schemes import SCHEMES


def quantize(arguments: Sequence[str]) -> None:
    """Parse the arguments and quantise. Raises QuireServerError."""
    parser = argparse.ArgumentParser(
        prog="quire-server quantize",
        allow_abbrev=False,
        description="Write a smaller model directory, in the layout of compressed-tensors.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of the model")
    parser.add_argument(
        "--scheme",
        required=True,
        choices=SCHEMES,
        help="fp8: 8 bit float. int8: 8 bit weights and activations. awq, gptq: 4 bit weights in groups",
    )
    parser.add_argument(
        "--calibration", required=True, type=Path, metavar="FILE", help="UTF-8 text like that to be served"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="where it goes; a new directory"
    )
    wanted = parser.parse_args(arguments)
    run.run(wanted.model, SCHEMES[wanted.scheme], wanted.calibration, wanted.output, _say)


def eval_quality(arguments: Sequence[str]) -> None:
    """Parse the arguments and measure. Raises QuireServerError."""
    parser = argparse.ArgumentParser(
        prog="quire-server eval-quality",
        allow_abbrev=False,
        description="Perplexity of a model beside that of its original, and how often they agree.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of the quantised model")
    parser.add_argument(
        "--against", required=True, type=Path, metavar="ORIGINAL", help="what it was made from"
    )
    parser.add_argument(
        "--text", required=True, type=Path, metavar="FILE", help="UTF-8 text that was not used to calibrate"
    )
    wanted = parser.parse_args(arguments)
    perplexity.run(wanted.model, wanted.against, wanted.text, _say)


def _say(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()
