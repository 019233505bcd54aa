"""The settings of `quire-server serve`: one frozen dataclass, from which the flags, their environment
variables and their help are derived.

Called by the entry point and by each child process (they get the same arguments and parse them again, so
nothing has to be serialised), and by the contract tests on rendered pods. Imports nothing heavy: the health
process starts with it. A flag beats its variable: `--max-num-seqs` is `QUIRE_MAX_NUM_SEQS`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from quire_server import faults
from quire_server.core.errors import ConfigError

ENV_PREFIX = "QUIRE_"
_NOT_SETTINGS = frozenset({"QUIRE_FAULT", "QUIRE_ALLOW_FAULTS"})
_LOG_LEVELS = ("debug", "info", "warning", "error")

Parser = Callable[[str], Any]


def _integer(low: int, high: int = 2**53) -> Parser:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}")
        return value

    return parse


def _seconds(low: float) -> Parser:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= 10**7:
            raise ValueError(f"must be between {low:g} and 10000000 seconds")
        return value

    return parse


def _one_of(*choices: str) -> Parser:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("must be names separated by commas")
    return names


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _path(text: str) -> Path:
    return Path(_text(text))  # an empty one would be the current directory


def _setting(default: Any, parse: Parser, about: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": about})


@dataclass(frozen=True)
class ServeConfig:
    """Everything that `quire-server serve` can be told. None means: derived from the model or the machine."""

    model: Path
    host: str = _setting("127.0.0.1", _text, "address that the API and the health server listen on")
    port: int = _setting(8000, _integer(1, 65535), "port of the API")
    health_port: int = _setting(8001, _integer(1, 65535), "port of /startupz, /readyz, /livez and /statusz")
    served_model_name: tuple[str, ...] = _setting(
        (), _names, "names that clients may ask for, separated by commas (default: the directory's name)"
    )
    device: str = _setting("auto", _one_of("auto", "cpu", "cuda"), "where the model runs")
    dtype: str = _setting("auto", _one_of("auto", "float32", "bfloat16"), "type of weights and KV cache")
    max_model_len: int | None = _setting(
        None, _integer(1), "longest prompt plus answer (default: the model's)"
    )
    max_num_seqs: int = _setting(64, _integer(1, 4096), "requests that run at once")
    max_num_batched_tokens: int | None = _setting(
        None, _integer(1), "tokens of one step (default: 512, and at least one for each running request)"
    )
    kv_cache_dtype: str = _setting(
        "auto", _one_of("auto", "fp8", "int8"), "type of the KV cache; fp8 (e4m3) and int8 are scaled"
    )
    block_size: int = _setting(16, _integer(1, 1024), "tokens of one KV block")
    kv_cache_memory_bytes: int | None = _setting(
        None, _integer(1), "bytes of the KV cache (default: by memory)"
    )
    kv_offload_host_bytes: int = _setting(
        0, _integer(0), "bytes of host memory for KV blocks that the cache evicts (0: none)"
    )
    kv_offload_disk_path: Path | None = _setting(
        None, _path, "directory of a local disk for KV blocks that the host's memory evicts"
    )
    kv_offload_disk_bytes: int = _setting(0, _integer(0), "bytes of that disk")
    preemption_mode: str = _setting(
        "recompute",
        _one_of("recompute", "swap"),
        "what becomes of a preempted request's KV blocks: given up, or kept in the host's memory",
    )
    num_gpu_blocks_override: int | None = _setting(
        None, _integer(1), "number of KV blocks, whatever the memory"
    )
    enable_prefix_caching: bool = _setting(True, _boolean, "keep and share the KV of common prefixes")
    enable_chunked_prefill: bool = _setting(
        True, _boolean, "compute long prompts in pieces among other requests"
    )
    scheduling_policy: str = _setting(
        "fcfs",
        _one_of("fcfs", "priority", "sjf"),
        "who goes first: the earliest, the most urgent, the shortest",
    )
    batching: str = _setting(
        "continuous",
        _one_of("continuous", "static"),
        "static: nobody joins a batch that runs; to compare with",
    )
    max_num_queued_reqs: int = _setting(
        512, _integer(0, 10**6), "requests that may wait; more are answered 503"
    )
    max_num_queued_tokens: int | None = _setting(
        None, _integer(1), "prompt tokens that may wait for their answer to begin (default: no limit)"
    )
    max_num_reqs_per_key: int | None = _setting(
        None, _integer(1, 10**6), "requests of one API key that run or wait; more are answered 429"
    )
    request_timeout_seconds: float | None = _setting(
        None, _seconds(0.001), "longest time from a request to its last token (default: no limit)"
    )
    api_keys_dir: Path | None = _setting(
        None, _path, "directory of API keys: file name = client, content = key"
    )
    startup_timeout_seconds: float = _setting(1800.0, _seconds(1), "longest time until ready")
    load_stall_timeout_seconds: float = _setting(
        300.0, _seconds(1), "longest time without progress while loading"
    )
    stall_timeout_seconds: float = _setting(
        60.0, _seconds(1), "longest time without a step while work is pending"
    )
    canary_interval_seconds: float = _setting(
        60.0, _seconds(1), "an engine idle this long proves itself again"
    )
    drain_timeout_seconds: float = _setting(
        120.0, _seconds(0), "time that streams get to finish after SIGTERM"
    )
    pre_stop_seconds: float = _setting(
        0.0, _seconds(0), "how long the pod has left its Service when SIGTERM comes"
    )
    seed: int = _setting(0, _integer(0, 2**63 - 1), "seed of requests that bring none")
    chat_template: Path | None = _setting(
        None, _path, "file with a chat template that replaces the model's own"
    )
    termination_log: Path = _setting(
        Path("/dev/termination-log"), _path, "where the reason of a failure goes"
    )
    log_level: str = _setting("info", _one_of(*_LOG_LEVELS), "least level that is logged")

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may ask for; the first one labels metrics and answers."""
        return self.served_model_name or (self.model.resolve().name,)


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> ServeConfig:
    """Settings from the arguments after `serve` and from QUIRE_* variables. Raises ConfigError."""
    flags = vars(build_parser().parse_args(argv))
    settings = [f for f in dataclasses.fields(ServeConfig) if f.name != "model"]
    _refuse_unknown_variables(environ, {ENV_PREFIX + f.name.upper() for f in settings})
    values: dict[str, Any] = {}
    for setting in settings:
        variable = ENV_PREFIX + setting.name.upper()
        if flags[setting.name] is not None:
            values[setting.name] = _parse(_flag(setting.name), setting, flags[setting.name])
        elif variable in environ:
            values[setting.name] = _parse(variable, setting, environ[variable])
    config = ServeConfig(model=Path(flags["model"]), **values)
    _check(config)
    faults.parse(environ)
    return config


def build_parser() -> argparse.ArgumentParser:
    """The command line; values stay text here, so that flags and variables are parsed by the same code."""
    parser = _Parser(prog="quire-server serve", allow_abbrev=False, description="Serve one model.")
    parser.add_argument("model", metavar="MODEL", help="directory of the model")
    for setting in dataclasses.fields(ServeConfig):
        if setting.name == "model":
            continue
        about = f"{setting.metadata['help']} [{ENV_PREFIX}{setting.name.upper()}]"
        if setting.default not in (None, ()):
            about += f" (default: {str(setting.default).lower() if _is_switch(setting) else setting.default})"
        if _is_switch(setting):
            on, off = _flag(setting.name), "--no-" + _flag(setting.name)[2:]
            parser.add_argument(on, dest=setting.name, action="store_const", const="true", help=about)
            parser.add_argument(off, dest=setting.name, action="store_const", const="false")
        else:
            parser.add_argument(_flag(setting.name), dest=setting.name, help=about)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Usage errors are ConfigErrors like all others; `--help` shows every flag."""
        raise ConfigError(f"{message} (see quire-server serve --help)")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_switch(setting: dataclasses.Field[Any]) -> bool:
    return isinstance(setting.default, bool)


def _parse(source: str, setting: dataclasses.Field[Any], text: str) -> Any:
    try:
        return setting.metadata["parse"](text)
    except ValueError as error:
        why = str(error) if str(error).startswith("must") else "must be a number"
        raise ConfigError(f"{source}={text!r}: {why}") from None


def _refuse_unknown_variables(environ: Mapping[str, str], known: set[str]) -> None:
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known and name not in _NOT_SETTINGS:
            raise ConfigError(
                f"unknown environment variable {name}: remove it, or see quire-server serve --help"
            )


def _check(config: ServeConfig) -> None:
    """What no single value shows."""
    if config.port == config.health_port:
        raise ConfigError(f"--port and --health-port are both {config.port}: choose two different ports")
    if config.max_num_reqs_per_key is not None and config.api_keys_dir is None:
        raise ConfigError("--max-num-reqs-per-key needs API keys to tell clients apart: give --api-keys-dir")
    if config.kv_offload_host_bytes == 0 and config.kv_offload_disk_path is not None:
        raise ConfigError(
            "--kv-offload-disk-path needs --kv-offload-host-bytes: blocks reach the disk through the host"
        )
    if (config.kv_offload_disk_path is None) != (config.kv_offload_disk_bytes == 0):
        raise ConfigError("--kv-offload-disk-path and --kv-offload-disk-bytes need each other: give both")
    if config.kv_offload_host_bytes == 0 and config.preemption_mode == "swap":
        raise ConfigError("--preemption-mode swap needs --kv-offload-host-bytes: room for swapped blocks")
    tokens = config.max_num_batched_tokens
    if tokens is not None and tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {config.max_num_seqs}: "
            "each running request needs one token of a step; raise the first or lower the second"
        )
