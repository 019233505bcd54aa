"""Puts a server under load from a separate process: guidellm, or the minimal client (see
``bench.http_overhead``).

guidellm is a common load generator. It has its own virtual environment, which ``make bench`` fills from
requirements/loadgen.txt, reads the tokenizer from the model's directory, and may use no network.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.process_cpu import CpuLog

ROOT = Path(__file__).resolve().parent.parent
GUIDELLM = ROOT / ".cache" / "guidellm" / "bin" / "guidellm"
#: The metrics of guidellm that are kept for every request.
KEPT = (
    "request_latency",
    "time_to_first_token_ms",
    "time_per_output_token_ms",
    "inter_token_latency_ms",
    "prompt_tokens",
    "output_tokens",
)
_LIMIT_SECONDS = 300
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Load:
    """The requests, and the server that gets them."""

    port: int
    model: Path
    served_name: str
    clients: int
    prompts: Sequence[str]
    new_tokens: int
    processes: dict[str, int]  # the server's, by name, whose CPU seconds are measured

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return len(self.prompts) * self.new_tokens


@dataclass(frozen=True)
class Run:
    """The measured results."""

    seconds: float  # from the first request to the last answer
    cpu: dict[
        str, float
    ]  # CPU seconds in that time by process: "client" is the load generator, "others" the rest
    requests: list[dict[str, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # seconds between two arrivals of one answer
    latencies: list[float] = field(default_factory=list)  # seconds from a request to its answer's end


def guidellm(load: Load, *, stream: bool) -> Run:
    """A closed loop of ``load.clients`` with each prompt once."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        rows = [{"prompt": one, "output_tokens_count": load.new_tokens} for one in load.prompts]
        _lines(Path(folder) / "prompts.jsonl", rows)
        scenario = Path(folder) / "scenario.json"
        scenario.write_text(json.dumps({"spec": _scenario(load, Path(folder), stream=stream)}))
        command = [str(GUIDELLM), "run", "--config", str(scenario), "--disable-console"]
        environ = {"HF_HOME": folder, "GUIDELLM__MAX_WORKER_PROCESSES": "1", **_OFFLINE}
        _, log = _watched(command, load, folder, environ)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    done = benchmark["requests"]["successful"]
    tokens = sum(one["output_tokens"] for one in done)
    if tokens != load.tokens:
        raise RuntimeError(f"guidellm got {tokens} tokens of {load.tokens}")
    start = min(one["request_start_time"] for one in done)
    end = max(one["request_end_time"] for one in done)
    return Run(end - start, log.between(start, end), [{name: one[name] for name in KEPT} for one in done])


def _scenario(load: Load, folder: Path, *, stream: bool) -> dict[str, object]:
    return {
        "backend": {
            "kind": "openai_http",
            "target": f"http://127.0.0.1:{load.port}",
            "model": load.served_name,
            "request_format": "/v1/completions",
            "stream": stream,
            "extras": {"body": {"temperature": 0}},
        },
        "profile": {"kind": "concurrent", "streams": [load.clients]},
        "constraints": [{"kind": "max_requests", "count": len(load.prompts)}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(load.model)},
        "data": [
            {
                "kind": "json_file",
                "path": str(folder / "prompts.jsonl"),
                "load_kwargs": {"split": "train"},
            }
        ],
        "metrics": {"kind": "generative", "sample_size": 0},
        "outputs": [{"kind": "json", "path": str(folder / "report.json")}],
    }


def bare(load: Load, *, stream: bool, rate: float | None = None) -> Run:
    """The same with the minimal client; with `rate` an open loop of that many requests a second."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"model": load.served_name, "max_tokens": load.new_tokens, "temperature": 0}
        asked |= {"ignore_eos": True, "stream": stream}
        bodies = Path(folder) / "requests.jsonl"
        _lines(bodies, [{**asked, "prompt": prompt} for prompt in load.prompts])
        program = Path(__file__).parent / "minimal_client.py"
        command = [sys.executable, "-P", str(program), str(load.port), str(load.clients), str(bodies)]
        command += ["--rate", str(rate)] if rate else []
        output, log = _watched(command, load, folder, {})
    requests = json.loads(output)
    start = min(one["start"] for one in requests)
    end = max(one["arrivals"][-1] for one in requests)
    gaps = [
        after - before
        for one in requests
        for before, after in zip(one["arrivals"], one["arrivals"][1:], strict=False)
    ]
    latencies = [one["arrivals"][-1] - one["start"] for one in requests]
    return Run(end - start, log.between(start, end), gaps=gaps, latencies=latencies)


def _watched(command: list[str], load: Load, folder: str, environ: dict[str, str]) -> tuple[str, CpuLog]:
    """Run a command in its own session; returns its output and the CPU seconds of all processes."""
    errors = Path(folder) / "errors"
    with errors.open("w") as sink:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environ},
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            start_new_session=True,
        )
        with CpuLog(load.processes, process.pid) as log:
            try:
                output, _ = process.communicate(timeout=_LIMIT_SECONDS)
            finally:
                process.kill()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{output[-2000:]}\n{errors.read_text()[-2000:]}")
    return output, log


def _lines(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
