"""``kubectl quire size``: whether a model fits on an accelerator, and how many requests fit beside it; of
several accelerators, which.

The arithmetic is ``quire_sizing``, as in the operator's condition FitsAccelerator. Reads one config.json and
the cluster's AcceleratorProfiles or, without a cluster, the shipped ones.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire_kubectl import deployed, together
from quire_kubectl.kubectl import KubectlError
from quire_kubectl.together import columns
from quire_operator import quantity
from quire_operator.resources.scaling_behavior import DEFAULT_GPU_BATCH
from quire_operator.spec import Profile
from quire_sizing import memory
from quire_sizing.accelerators import SHEETS
from quire_sizing.errors import SizingError
from quire_sizing.memory import Accelerator, Budget, Serving, Verdict
from quire_sizing.model import ModelShape, from_config
from quire_sizing.stages import balance, stages, utilization

DOES_NOT_FIT = 3
_MOST_CONFIG = 1 << 20
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kMGT]|[KMGT]i)?B?(?:/s)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags have the names of the fields of an LLMDeployment."""
    parser.add_argument(
        "models",
        type=Path,
        nargs="+",
        metavar="MODEL",
        help="a folder with a config.json, or that file; several with --together",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="whether all of them fit on one accelerator at the same time, each in a pod with its share "
        "of it",
    )
    parser.add_argument(
        "--task",
        choices=("Generate", "Embed"),
        default="Generate",
        help="what the model is for: text, or vectors of texts, which need no KV cache (default Generate)",
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--memory", type=size, help="of one accelerator, such as 80GB or 141Gi")
    one.add_argument(
        "--profile",
        metavar="NAME",
        action="append",
        help="AcceleratorProfile: the cluster's, or a shipped one such as h100-80gb; several are compared, "
        "and all of them without this and --memory",
    )
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        help="ranks that share each layer, each with an accelerator (default 1)",
    )
    parser.add_argument(
        "--pipeline", type=int, default=1, help="stages of layers, each with as many ranks (default 1)"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, help="over which all of them are spread, equally many (default 1)"
    )
    parser.add_argument("--bandwidth", type=size, default=0, help="of --memory, such as 3.35TB/s")
    _add_limits(parser)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """What is asked of the model, and how its numbers are stored."""
    parser.add_argument(
        "--max-model-len", type=int, help="prompt and answer (default: the model's own limit)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=DEFAULT_GPU_BATCH, help="requests at once (default %(default)s)"
    )
    parser.add_argument(
        "--max-adapters", type=int, default=0, help="LoRA adapters on the accelerator at once (default 0)"
    )
    parser.add_argument(
        "--max-adapter-rank", type=int, default=16, help="the highest rank of one (default 16)"
    )
    parser.add_argument("--weight-bits", type=float, default=16, help="16, 8 or 4 (default 16)")
    parser.add_argument("--kv-bits", type=int, choices=(32, 16, 8), default=16, help="(default 16)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="(default 0.9)")
    parser.add_argument("--host-memory", type=size, help="of the container, to be checked too")
    parser.add_argument(
        "--staging-memory",
        type=size,
        default=0,
        help="of it for KV blocks on their way, of a role of disaggregation (default 0)",
    )


def size(text: str) -> int:
    """Bytes of "80GB", "64Gi", "3.35TB/s"."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write one such as 80GB or 64Gi")
    return int(float(found[1]) * _UNITS[found[2] or ""])


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An accelerator that is asked about. `cost_per_hour`: as the profile has it, empty without one."""

    name: str = ""
    accelerator: Accelerator
    cost_per_hour: str = ""


@dataclass(frozen=True, kw_only=True)
class Sized:
    """What fits on it."""

    candidate: Candidate
    budget: Budget

    @property
    def order(self) -> tuple[bool, bool, float, int]:
        """Those that fit first, then the cheapest, then the smallest."""
        cost = self.candidate.cost_per_hour
        fits = self.budget.verdict is not Verdict.NOTHING
        return not fits, not cost, float(cost or 0), self.candidate.accelerator.memory


def run(arguments: argparse.Namespace) -> int:
    """Print the result; 0: a request fits on at least one accelerator, 3: on none. Raises SizingError,
    SpecError.
    """
    if len(arguments.models) > 1 and not arguments.together:
        raise SizingError(
            "Several models are sized with --together, for one accelerator: add it, or give one."
        )
    models = {path.resolve().name: from_config(_read(path)) for path in arguments.models}
    if len(models) < len(arguments.models):
        raise SizingError("Two models have the same folder name; give each another one.")
    if arguments.together:
        return _run_together(models, arguments)
    (model,) = models.values()
    serving = _serving(arguments)
    candidates, notes = _candidates(arguments)
    found = sorted(
        (Sized(candidate=one, budget=memory.budget(model, one.accelerator, serving)) for one in candidates),
        key=lambda sized: sized.order,
    )
    for one in candidates:
        whole = one.accelerator.memory + serving.host_taken
        host = whole if arguments.host_memory is None else arguments.host_memory
        notes += memory.advice(serving, one.accelerator, host_memory=host)
    if arguments.host_memory is not None:
        notes += memory.adapter_advice(model, serving, host_memory=arguments.host_memory)
    notes += memory.format_advice(model, serving)
    notes = list(dict.fromkeys(notes))
    if arguments.output == "json":
        text = json.dumps(_document(model, found, notes), indent=2)
    elif len(found) == 1:
        text = _text(model, found[0], serving, notes, arguments.host_memory)
    else:
        text = _comparison(model, found, serving, notes)
    sys.stdout.write(f"{text}\n")
    return DOES_NOT_FIT if all(sized.budget.verdict is Verdict.NOTHING for sized in found) else 0


def _serving(arguments: argparse.Namespace) -> Serving:
    return Serving(
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        weight_bits=arguments.weight_bits,
        kv_bits=arguments.kv_bits,
        utilization=arguments.gpu_memory_utilization,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        nodes=arguments.nodes,
        staging=arguments.staging_memory,
        pools=arguments.task == "Embed",
        max_adapters=arguments.max_adapters,
        max_adapter_rank=arguments.max_adapter_rank,
        adapter_bits=32 if arguments.kv_bits == 32 else 16,
    )


def _run_together(models: Mapping[str, ModelShape], arguments: argparse.Namespace) -> int:
    """Print whether the models fit one accelerator at the same time."""
    serving = _serving(arguments)
    if serving.ranks > 1:
        raise SizingError("Models are together on one accelerator: drop --tensor and --pipeline.")
    candidates, notes = _candidates(arguments)
    placed = [together.place(models, one.name, one.accelerator, serving) for one in candidates]
    if arguments.output == "json":
        rows = [{"profile": one.name, **asdict(one.verdict)} for one in placed]
        needs = {name: asdict(need) for name, need in together.largest(placed).needs.items()}
        text = json.dumps({"models": needs, "profiles": rows, "advice": notes}, indent=2)
    else:
        text = together.text(placed, serving, notes)
    sys.stdout.write(f"{text}\n")
    return DOES_NOT_FIT if all(one.verdict.verdict is Verdict.NOTHING for one in placed) else 0


def _candidates(arguments: argparse.Namespace) -> tuple[list[Candidate], list[str]]:
    """The accelerators to compare, and where their numbers are from."""
    if arguments.memory is not None:
        accelerator = Accelerator(memory=arguments.memory, bandwidth=arguments.bandwidth)
        return [Candidate(accelerator=accelerator)], []
    if not arguments.profile:
        return _every_profile()
    named = [_of_profile(name) for name in dict.fromkeys(arguments.profile)]
    return [candidate for candidate, _ in named], [note for _, note in named]


def _every_profile() -> tuple[list[Candidate], list[str]]:
    """The cluster's profiles, else the shipped ones."""
    try:
        found = deployed.every_profile("--request-timeout=5s")
        why = "there are none"
    except KubectlError as error:
        found, why = {}, str(error).splitlines()[-1]
    if not found:
        shipped = [Candidate(name=name, accelerator=sheet.accelerator) for name, sheet in SHEETS.items()]
        return shipped, [f"Profiles as they are shipped, without prices; the cluster's: {why}"]
    known = [_candidate(name, profile) for name, profile in found.items()]
    return known, ["Profiles as the cluster has them."]


def _of_profile(name: str) -> tuple[Candidate, str]:
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
        note = f"{shipped[0]} as it is shipped ({sheet.source}); the cluster's: {why}"
        return Candidate(name=shipped[0], accelerator=sheet.accelerator), note
    return _candidate(name, found), f"{name} as the cluster's AcceleratorProfile has it."


def _candidate(name: str, profile: Profile) -> Candidate:
    bandwidth = quantity.whole_bytes(profile.memory_bandwidth) if profile.memory_bandwidth else 0
    accelerator = Accelerator(
        memory=quantity.whole_bytes(profile.memory),
        bandwidth=bandwidth,
        interconnect=profile.interconnect,
    )
    return Candidate(name=name, accelerator=accelerator, cost_per_hour=profile.cost_per_hour)


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
    model: ModelShape, sized: Sized, serving: Serving, notes: Sequence[str], host_memory: int | None
) -> str:
    accelerator, budget = sized.candidate.accelerator, sized.budget
    length = serving.max_model_len or model.longest
    room = max(0, budget.usable - budget.weights - budget.adapters - budget.workspace)
    share = f"{serving.utilization:.0%} of {_gb(accelerator.memory).strip()}"
    lines = [
        _head(model, serving),
        "",
        f"  usable            {_gb(budget.usable)}  {share}",
        f"  weights           {_gb(budget.weights)}",
        f"  working memory    {_gb(budget.workspace)}  estimated; the server measures its own",
        *_adapters(model, budget, serving, host_memory),
        *_cache(budget, serving, room, length),
        *_staging(model, serving),
        "",
        *_stages(model, budget, serving),
        _verdict(serving, budget, length),
    ]
    if accelerator.bandwidth and not serving.pools:
        bound = memory.decode_bound(accelerator.bandwidth, memory.stream_weights(model, serving))
        lines.append(f"One stream gets at most {bound:,.0f} tokens a second: each reads all weights.")
    if sized.candidate.cost_per_hour:
        lines.append(f"An hour costs {sized.candidate.cost_per_hour}.")
    lines += [f"Note: {line}" for line in notes]
    return "\n".join(lines)


def _cache(budget: Budget, serving: Serving, room: int, length: int) -> list[str]:
    """The KV cache, which a model that embeds texts does not have."""
    if serving.pools:
        return []
    tokens = f"{room // budget.kv_per_token:,} tokens of {budget.kv_per_token:,} B"
    return [
        f"  left for KV       {_gb(room)}  {tokens}",
        f"  asked for         {_gb(budget.kv_wanted)}  {serving.max_num_seqs} requests of {length:,} tokens",
    ]


def _adapters(model: ModelShape, budget: Budget, serving: Serving, host_memory: int | None) -> list[str]:
    """The places for LoRA adapters, and how many the host has room for."""
    if not serving.max_adapters:
        return []
    rank = serving.max_adapter_rank
    lines = [f"  adapters          {_gb(budget.adapters)}  {serving.max_adapters} places for rank {rank}"]
    if host_memory is not None:
        fitting = memory.host_adapters(model, serving, host_memory)
        lines.append(f"  adapters on host  {fitting:8,}     at most, of rank {rank} for every matrix")
    return lines


def _staging(model: ModelShape, serving: Serving) -> list[str]:
    """The host's memory through which prompts go from prefill to decode pods."""
    if not serving.staging:
        return []
    tokens = memory.staged_tokens(model, serving)
    return [
        f"  staging           {_gb(serving.staging)}  of the host; {tokens:,} tokens on their way at a time"
    ]


def _head(model: ModelShape, serving: Serving) -> str:
    head = f"{model.parameters / 1e9:.2f} billion parameters, {memory.held_bits(model, serving):g} bits each"
    if serving.ranks == 1:
        return head
    spread = f", {serving.ranks_per_node} on each of {serving.nodes} nodes" if serving.nodes > 1 else ""
    tightest = ", in the stage with room for the fewest tokens" if serving.pipeline > 1 else ""
    return f"{head}; of each of {serving.ranks} accelerators{spread}{tightest}:"


def _stages(model: ModelShape, budget: Budget, serving: Serving) -> list[str]:
    """What an accelerator of each stage has, and how busy the stages are; nothing of a single one."""
    if not budget.stages:
        return []
    rows: list[Sequence[str]] = [("STAGE", "LAYERS", "WEIGHTS", "WORKING", "LEFT FOR KV", "TOKENS")]
    for number, stage in enumerate(budget.stages):
        rows.append(
            (
                str(number),
                str(stage.layers),
                *(_gb(count).strip() for count in (stage.weights, stage.workspace, stage.room)),
                f"{stage.room // stage.kv_per_token:,}",
            )
        )
    found = stages(model, serving.pipeline, serving.tensor)
    shares = {streams: utilization(found, streams) for streams in (1, serving.pipeline)}
    table = [f"  {row}" for row in columns(rows)]
    return [
        *table,
        "",
        f"Stages are busy for {shares[1]:.0%} of the time with one request, {shares[serving.pipeline]:.0%} "
        f"with {serving.pipeline} or more: min(1, requests / {serving.pipeline}) x mean / longest "
        f"({balance(found):.2f}) of their times.",
    ]


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
    lacking = budget.weights + budget.adapters + budget.workspace - budget.usable
    return (
        f"Does not fit: {_gb(lacking).strip()} are lacking before the first token. Take fewer bits, more or "
        "larger accelerators."
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:8.1f} GB"


def _document(model: ModelShape, found: Sequence[Sized], notes: Sequence[str]) -> dict[str, object]:
    """For programs: the budget of one accelerator, or a list of them."""
    head, advice = {"parameters": model.parameters}, {"advice": notes}
    if len(found) == 1:
        return {**head, **asdict(found[0].budget), **advice}
    rows = [
        {
            "profile": sized.candidate.name,
            "cost_per_hour": sized.candidate.cost_per_hour or None,
            **asdict(sized.budget),
        }
        for sized in found
    ]
    return {**head, "profiles": rows, **advice}


def _comparison(model: ModelShape, found: Sequence[Sized], serving: Serving, notes: Sequence[str]) -> str:
    """A line for each accelerator, the cheapest of those on which a request fits first."""
    length, most = serving.max_model_len or model.longest, serving.max_num_seqs
    rows = [("PROFILE", "MEMORY", "AT ONCE", "LONGEST", "TOKENS/S", "COST/H")]
    for sized in found:
        accelerator, budget = sized.candidate.accelerator, sized.budget
        bound = memory.decode_bound(accelerator.bandwidth, memory.stream_weights(model, serving))
        rows.append(
            (
                sized.candidate.name,
                _gb(accelerator.memory).strip(),
                f"{min(budget.concurrency, most)} of {most}",
                f"{budget.longest:,}" if budget.longest else "-",
                f"{bound:,.0f}" if budget.longest and bound else "-",
                sized.candidate.cost_per_hour or "-",
            )
        )
    return "\n".join(
        [
            _head(model, serving),
            "",
            *columns(rows),
            "",
            f"AT ONCE: requests of {length:,} tokens that fit. LONGEST: the context of one alone. TOKENS/S: "
            "the most that one stream gets.",
            *(f"Note: {line}" for line in notes),
        ]
    )
