"""``kubectl quire size``: whether a model fits on an accelerator, and how many requests fit beside it.

The arithmetic is ``quire_sizing``, as in the operator's condition FitsAccelerator. Reads one config.json and,
where a profile is named, the cluster's AcceleratorProfile or the shipped one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from quire_kubectl import deployed
from quire_kubectl.kubectl import KubectlError
from quire_operator import quantity
from quire_operator.resources.scaling_behavior import DEFAULT_BATCH
from quire_sizing import memory
from quire_sizing.accelerators import SHEETS
from quire_sizing.errors import SizingError
from quire_sizing.memory import Accelerator, Budget, Serving, Verdict
from quire_sizing.model import ModelShape, from_config

DOES_NOT_FIT = 3
_MOST_CONFIG = 1 << 20
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kMGT]|[KMGT]i)?B?(?:/s)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags have the names of the fields of an LLMDeployment."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder with a config.json, or that file")
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--memory", type=size, help="of one accelerator, such as 80GB or 141Gi")
    one.add_argument(
        "--profile",
        metavar="NAME",
        help="AcceleratorProfile: the cluster's, or a shipped one such as h100-80gb",
    )
    parser.add_argument("--gpus", type=int, default=1, help="accelerators that share one replica (default 1)")
    parser.add_argument("--bandwidth", type=size, default=0, help="of --memory, such as 3.35TB/s")
    parser.add_argument(
        "--max-model-len", type=int, help="prompt and answer (default: the model's own limit)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=DEFAULT_BATCH, help="requests at once (default %(default)s)"
    )
    parser.add_argument("--weight-bits", type=float, default=16, help="16, 8 or 4 (default 16)")
    parser.add_argument("--kv-bits", type=int, choices=(32, 16, 8), default=16, help="(default 16)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="(default 0.9)")
    parser.add_argument("--host-memory", type=size, help="of the container, to be checked too")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def size(text: str) -> int:
    """Bytes of "80GB", "64Gi", "3.35TB/s"."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write one such as 80GB or 64Gi")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def run(arguments: argparse.Namespace) -> int:
    """Print the result; 0: a request fits, 3: none does. Raises SizingError, SpecError."""
    model = from_config(_read(arguments.model))
    accelerator = Accelerator(memory=arguments.memory or 0, bandwidth=arguments.bandwidth)
    origin: tuple[str, ...] = ()
    if arguments.profile:
        accelerator, origin = _of_profile(arguments.profile)
    serving = Serving(
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        weight_bits=arguments.weight_bits,
        kv_bits=arguments.kv_bits,
        utilization=arguments.gpu_memory_utilization,
        tensor_parallel=arguments.gpus,
    )
    budget = memory.budget(model, accelerator, serving)
    host = accelerator.memory * arguments.gpus if arguments.host_memory is None else arguments.host_memory
    advice = (*origin, *memory.advice(serving, accelerator, host_memory=host))
    code = DOES_NOT_FIT if budget.verdict is Verdict.NOTHING else 0
    if arguments.output == "json":
        document = {"parameters": model.parameters, **asdict(budget), "advice": advice}
        text = json.dumps(document, indent=2)
    else:
        text = _text(model, accelerator, serving, budget, advice)
    sys.stdout.write(f"{text}\n")
    return code


def _of_profile(name: str) -> tuple[Accelerator, tuple[str, ...]]:
    """The cluster's profile, else the shipped one whose name is or starts with the given one; and which it
    is.
    """
    try:
        found = deployed.profile(name, "--request-timeout=5s")
    except KubectlError as error:
        shipped = [one for one in SHEETS if one == name or one.startswith(f"{name}-")]
        why = str(error).splitlines()[-1]
        if len(shipped) != 1:
            known = ", ".join(shipped or SHEETS)
            raise SizingError(
                f"{name} is no shipped profile (give one of {known}), and no other: {why}"
            ) from error
        sheet = SHEETS[shipped[0]]
        return sheet.accelerator, (f"{shipped[0]} as it is shipped ({sheet.source}); the cluster's: {why}",)
    bandwidth = quantity.whole_bytes(found.memory_bandwidth) if found.memory_bandwidth else 0
    accelerator = Accelerator(memory=quantity.whole_bytes(found.memory), bandwidth=bandwidth)
    return accelerator, (f"{name} as the cluster's AcceleratorProfile has it.",)


def _read(path: Path) -> dict[str, object]:
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            document = json.loads(opened.read(_MOST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise SizingError(f"{file} cannot be read as a config.json: {error}") from error
    if not isinstance(document, dict):
        raise SizingError(f"{file} is no JSON object; give the config.json of a model.")
    return document


def _text(
    model: ModelShape, accelerator: Accelerator, serving: Serving, budget: Budget, advice: tuple[str, ...]
) -> str:
    length = serving.max_model_len or model.longest
    room = max(0, budget.usable - budget.weights - budget.workspace)
    share = f"{serving.utilization:.0%} of {_gb(accelerator.memory).strip()}"
    share += " of each of them" if serving.tensor_parallel > 1 else ""
    tokens = f"{room // budget.kv_per_token:,} tokens of {budget.kv_per_token:,} B"
    lines = [
        f"{model.parameters / 1e9:.2f} billion parameters, {serving.weight_bits:g} bits each",
        "",
        f"  usable            {_gb(budget.usable)}  {share}",
        f"  weights           {_gb(budget.weights)}",
        f"  working memory    {_gb(budget.workspace)}  estimated; the server measures its own",
        f"  left for KV       {_gb(room)}  {tokens}",
        f"  asked for         {_gb(budget.kv_wanted)}  {serving.max_num_seqs} requests of {length:,} tokens",
        "",
        _verdict(serving, budget, length),
    ]
    if accelerator.bandwidth:
        bound = memory.decode_bound(accelerator.bandwidth, budget.weights)
        lines.append(f"One stream gets at most {bound:,.0f} tokens a second: each reads all weights.")
    lines += [f"Note: {line}" for line in advice]
    return "\n".join(lines)


def _verdict(serving: Serving, budget: Budget, length: int) -> str:
    if budget.verdict is Verdict.FITS:
        return f"Fits: all {serving.max_num_seqs} requests, each with {length:,} tokens."
    if budget.verdict is Verdict.FEWER:
        return (
            f"Fits: {budget.concurrency} requests of {length:,} tokens at once, more if they are shorter; "
            f"the rest of {serving.max_num_seqs} wait."
        )
    if budget.longest:
        return f"Does not fit: one request of {length:,} tokens. Lower maxModelLen to {budget.longest:,}."
    lacking = budget.weights + budget.workspace - budget.usable
    return (
        f"Does not fit: {_gb(lacking).strip()} are lacking before the first token. Take fewer bits, more or "
        "larger accelerators."
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:8.1f} GB"
