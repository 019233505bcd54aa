"""The settings of `quire-server serve`: one frozen dataclass, from which `flags` derives the flags, their
environment variables and their help.

Each child process gets the same arguments and parses them again, so nothing has to be serialised. Imports
nothing heavy, because the health process uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire_server import fault_injection, flags
from quire_server.core.topology import MAX_RANKS, Topology
from quire_server.errors import ConfigError
from quire_server.flags import (
    addresses,
    boolean,
    integer,
    names,
    nonempty,
    number,
    one_of,
    path,
    seconds,
    setting,
    url,
)

NIXL_PACKAGE = "nixl_cu13"  # of the extra `nixl`
_NOT_SETTINGS = frozenset({"QUIRE_FAULT", "QUIRE_ALLOW_FAULTS", "QUIRE_REVISION", "QUIRE_CPU_ISA"})
_OF_A_NODE = ("host", "node_rank", "pod_address", "start_delay_seconds", "termination_log")
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServeConfig:
    """Every setting of `quire-server serve`. None means: derived from the model or the machine."""

    model: Path
    host: str = setting("127.0.0.1", nonempty, "address that the API and the health server listen on")
    port: int = setting(8000, integer(1, 65535), "port of the API")
    health_port: int = setting(8001, integer(1, 65535), "port of /startupz, /readyz, /livez and /statusz")
    served_model_name: tuple[str, ...] = setting(
        (),
        names,
        "names that clients may use in requests, separated by commas (default: the directory's name)",
    )
    task: str = setting(
        "generate",
        one_of("generate", "embed"),
        "what the model is for: text, or vectors and scores of texts (/v1/embeddings, /v1/rerank)",
    )
    pooling: str = setting(
        "auto",
        one_of("auto", "cls", "mean", "last"),
        "which states of a text become its vector; auto: as sentence-transformers' files beside it say",
    )
    device: str = setting("auto", one_of("auto", "cpu", "cuda"), "device that the model runs on")
    tensor_parallel_size: int = setting(
        1,
        integer(1, MAX_RANKS),
        "number of processes that share each layer of the model; on GPUs each has one of its own",
    )
    pipeline_parallel_size: int = setting(
        1,
        integer(1, MAX_RANKS),
        "number of stages of consecutive layers, each with as many processes as share a layer",
    )
    nodes: int = setting(
        1,
        integer(1, MAX_RANKS),
        "number of nodes over which these processes are spread, equally many on each",
    )
    node_rank: int = setting(
        0, integer(0, MAX_RANKS - 1), "which of these nodes this is; the first answers requests"
    )
    leader_address: str | None = setting(None, nonempty, "address of the first node, for the others")
    pod_address: str | None = setting(None, nonempty, "address of this node, for the others")
    start_delay_seconds: float = setting(0.0, seconds(0), "time to wait before anything is loaded")
    dtype: str = setting(
        "auto", one_of("auto", "float32", "bfloat16"), "number format of the computation and of the KV cache"
    )
    quantization: str = setting(
        "auto",
        one_of("auto", "none", "int8", "int4"),
        "arithmetic of the linear layers; auto: int8 with dtype auto on a CPU with AVX2, else none",
    )
    max_model_len: int | None = setting(None, integer(1), "longest prompt plus answer (default: the model's)")
    max_num_seqs: int | None = setting(
        None, integer(1, 4096), "most requests in one batch (default: 64 on a CPU, 256 on a GPU)"
    )
    max_num_batched_tokens: int | None = setting(
        None,
        integer(1),
        "most tokens of one step (default: 512 on a CPU, 2048 on a GPU, 8192 on one of 64 GiB or more, and "
        "at least one for each running request)",
    )
    kv_cache_dtype: str = setting(
        "auto",
        one_of("auto", "fp8", "int8"),
        "number format of the KV cache; fp8 (e4m3) and int8 have scales",
    )
    block_size: int = setting(16, integer(1, 1024), "tokens of one KV block")
    kv_cache_memory_bytes: int | None = setting(
        None, integer(1), "bytes of the KV cache (default: from the available memory)"
    )
    gpu_memory_utilization: float = setting(
        0.9, number(0.01, 0.98), "share of the GPU's memory for weights, steps, graphs and the KV cache"
    )
    enforce_eager: bool = setting(
        False, boolean, "launch kernels one by one instead of capturing CUDA graphs"
    )
    cpu_offload_gb: float = setting(
        0.0,
        number(0, 1 << 16),
        "GiB of weights that stay in host memory and are copied to the GPU in each step",
    )
    kv_offload_host_bytes: int = setting(
        0, integer(0), "bytes of host memory for KV blocks that the cache evicts (0: none)"
    )
    kv_offload_disk_path: Path | None = setting(
        None, path, "directory on a local disk for KV blocks that host memory evicts"
    )
    kv_offload_disk_bytes: int = setting(0, integer(0, 64 << 40), "bytes of that disk for KV blocks")
    preemption_mode: str = setting(
        "recompute",
        one_of("recompute", "swap"),
        "what happens to a preempted request's KV blocks: freed, or kept in host memory",
    )
    num_gpu_blocks_override: int | None = setting(
        None, integer(1), "number of KV blocks, regardless of the memory"
    )
    enable_prefix_caching: bool = setting(True, boolean, "cache and share the KV blocks of common prefixes")
    enable_chunked_prefill: bool = setting(
        True, boolean, "compute long prompts in chunks, batched with other requests"
    )
    scheduling_policy: str = setting(
        "fcfs",
        one_of("fcfs", "priority", "sjf"),
        "order of requests: by arrival, by priority, by expected length of the answer",
    )
    batching: str = setting(
        "continuous",
        one_of("continuous", "static"),
        "static: no request joins a running batch; for comparison only",
    )
    speculative_method: str = setting(
        "none",
        one_of("none", "ngram", "draft-model"),
        "source of drafts: tokens that followed earlier in the text (ngram), or a smaller model",
    )
    num_speculative_tokens: int = setting(4, integer(1, 16), "most tokens of one draft")
    speculative_model: Path | None = setting(
        None, path, "directory of the draft model; it must have the model's tokenizer"
    )
    prompt_lookup_min: int = setting(2, integer(1, 32), "shortest n-gram that is looked up for a draft")
    prompt_lookup_max: int = setting(4, integer(1, 32), "longest n-gram that is looked up for a draft")
    max_adapters: int = setting(
        0, integer(0, 64), "most LoRA adapters on the device at once; more are kept on the host (0: none)"
    )
    max_adapter_rank: int = setting(
        16, integer(1, 64), "highest rank of a LoRA adapter, for which each place on the device has room"
    )
    adapters_dir: Path | None = setting(
        None, path, "directory of LoRA adapters: each directory in it is one, under its name"
    )
    kv_role: str = setting(
        "none",
        one_of("none", "kv_producer", "kv_consumer"),
        "kv_producer: computes prefixes for others; kv_consumer: has those of long prompts computed",
    )
    kv_transfer_port: int = setting(
        7602, integer(1, 65535), "port on which a kv_producer listens for consumers"
    )
    kv_producers: tuple[tuple[str, int], ...] = setting(
        (), addresses, "HOST:PORT of each kv_producer, separated by commas; a name may stand for several"
    )
    kv_transport: str = setting(
        "auto",
        one_of("auto", "tcp", "shared_memory", "nixl"),
        "how blocks are read; auto: shared memory where the kv_producer is in the same pod; nixl: on both",
    )
    kv_lease_seconds: float = setting(
        30.0, seconds(1), "longest time for which a kv_producer keeps blocks that are not read"
    )
    kv_staging_bytes: int = setting(
        4 << 30,
        integer(1),
        "bytes of host memory through which KV blocks go between a GPU and other servers",
    )
    local_prefill_below_tokens: int = setting(
        512,
        integer(1),
        "fewest tokens of a prompt, without its cached prefix, that a kv_consumer has computed",
    )
    max_num_queued_reqs: int = setting(
        512, integer(0, 10**6), "most requests in the queue; more are answered 503"
    )
    max_num_queued_tokens: int | None = setting(
        None, integer(1), "most prompt tokens of requests whose answers have not begun (default: no limit)"
    )
    max_num_reqs_per_key: int | None = setting(
        None, integer(1, 10**6), "most requests of one API key that run or wait; more are answered 429"
    )
    max_requests_per_minute_per_key: int | None = setting(
        None, integer(1, 10**6), "most requests of one API key per minute; more are answered 429"
    )
    max_tokens_per_minute_per_key: int | None = setting(
        None, integer(1, 10**9), "most tokens of one API key per minute, of prompts and answers"
    )
    request_timeout_seconds: float | None = setting(
        None, seconds(0.001), "longest time from a request to its last token (default: no limit)"
    )
    max_connection_age_seconds: float = setting(
        300.0, seconds(1), "age (10 % more or less) from which a connection is closed after its next answer"
    )
    disable_fastapi_docs: bool = setting(
        False, boolean, "serve neither /openapi.json nor the page of it at /docs"
    )
    api_keys_dir: Path | None = setting(
        None, path, "directory of API keys: file name = client, lines = key, and what it may do"
    )
    gateway_keys_dir: Path | None = setting(
        None, path, "directory of the public keys of gateways (PEM, Ed25519) whose signed requests are served"
    )
    gateway_audience: str | None = setting(
        None, nonempty, "whom these gateways sign for: NAMESPACE/NAME of the LLMDeployment"
    )
    auth_key_dir: Path | None = setting(
        None, path, "directory with a key that other pods of the model must have, too (default: the API keys)"
    )
    startup_timeout_seconds: float = setting(1800.0, seconds(1), "longest time until ready")
    load_stall_timeout_seconds: float = setting(
        300.0, seconds(1), "longest time without progress while loading"
    )
    stall_timeout_seconds: float = setting(
        60.0,
        seconds(1),
        "longest time without a step while work is pending, or in which a process does not run",
    )
    canary_interval_seconds: float = setting(
        60.0, seconds(1), "time without an answered request before the engine runs the canary"
    )
    canary_golden_path: Path | None = setting(
        None, path, "file of the tokens that the canary has to answer (default: those of its first run)"
    )
    drain_timeout_seconds: float = setting(
        120.0, seconds(0), "time for running requests to finish after SIGTERM"
    )
    pre_stop_seconds: float = setting(
        0.0, seconds(0), "time between the pod's removal from its Service and SIGTERM"
    )
    generation_config: str = setting(
        "auto",
        one_of("auto", "none"),
        "source of sampling defaults: the model's generation_config.json, or OpenAI's defaults",
    )
    watermark: str = setting(
        "off", one_of("off", "on-request", "always"), "which answers have a watermark; see detect-watermark"
    )
    watermark_key_path: Path | None = setting(None, path, "file with the secret key of watermarks")
    watermark_gamma: float = setting(0.5, number(0.01, 0.99), "share of the vocabulary that is green")
    watermark_delta: float = setting(2.0, number(0.0, 100.0), "what is added to the logits of green tokens")
    seed: int = setting(0, integer(0, 2**63 - 1), "seed of requests without one")
    chat_template: Path | None = setting(
        None, path, "file with a chat template that replaces the model's own"
    )
    tool_call_parser: str = setting(
        "auto",
        one_of("auto", "hermes", "llama", "mistral", "pythonic", "gemma", "none"),
        "how the model writes calls of tools; auto: as its chat template shows them; none: no tools",
    )
    reasoning_parser: str = setting(
        "auto",
        one_of("auto", "think", "none"),
        "whether <think>...</think> is reasoning_content; auto: if the chat template has it",
    )
    termination_log: Path = setting(
        Path("/dev/termination-log"), path, "file to which the reason of a failure is written"
    )
    otlp_endpoint: str | None = setting(
        None,
        url,
        "OTLP/HTTP address of a collector for traces, such as http://collector:4318 (default: none)",
    )
    trace_sample_ratio: float = setting(
        1.0, number(0.0, 1.0), "share of the traces that begin here that is sampled"
    )
    log_requests: str = setting(
        "metadata",
        one_of("off", "metadata", "content"),
        "what is logged of a request: nothing, client and counts, or also its text",
    )
    log_redact_path: Path | None = setting(
        None, path, "file of regular expressions, one a line, whose matches are logged as [redacted]"
    )
    max_log_len: int = setting(
        2000, integer(0, 10**6), "most characters of a prompt and of an answer in the log"
    )
    log_level: str = setting("info", one_of(*_LOG_LEVELS), "lowest level that is logged")

    @property
    def peer_key_dir(self) -> Path | None:
        """The directory of the key by which pods of the model authenticate each other."""
        return self.auth_key_dir or self.api_keys_dir

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return self.topology(0).size

    def topology(self, rank: int) -> Topology:
        """A rank's place among these processes."""
        return Topology(self.tensor_parallel_size, rank, self.pipeline_parallel_size, self.nodes)

    @property
    def local_ranks(self) -> range:
        """The ranks of the model that run on this node."""
        return self.topology(0).ranks_of_node(self.node_rank)

    @property
    def is_leader(self) -> bool:
        """Whether this node has the first rank, which decides, and answers requests."""
        return self.node_rank == 0

    @property
    def common(self) -> ServeConfig:
        """The settings that all nodes of a model have in common: without those of a node's own."""
        own: dict[str, Any] = {one.name: one.default for one in fields(self) if one.name in _OF_A_NODE}
        return replace(self, **own)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may ask for; the first one labels metrics and answers."""
        return self.served_model_name or (self.model.resolve().name,)


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> ServeConfig:
    """Settings from the arguments after `serve` and from QUIRE_* variables. Raises ConfigError."""
    config = ServeConfig(**flags.read(ServeConfig, argv, environ, other_variables=_NOT_SETTINGS))
    _check(config)
    fault_injection.parse(environ)
    return config


def _check(config: ServeConfig) -> None:
    """Check combinations of settings."""
    if config.port == config.health_port:
        raise ConfigError(f"--port and --health-port are both {config.port}: choose two different ports")
    if (config.gateway_keys_dir is None) != (config.gateway_audience is None):
        raise ConfigError("--gateway-keys-dir and --gateway-audience need each other: give both, or neither")
    if config.api_keys_dir is None and config.gateway_keys_dir is None:
        for flag, limit in (
            ("--max-num-reqs-per-key", config.max_num_reqs_per_key),
            ("--max-requests-per-minute-per-key", config.max_requests_per_minute_per_key),
            ("--max-tokens-per-minute-per-key", config.max_tokens_per_minute_per_key),
        ):
            if limit is not None:
                raise ConfigError(f"{flag} needs API keys to tell clients apart: give --api-keys-dir")
    if config.kv_offload_host_bytes == 0 and config.kv_offload_disk_path is not None:
        raise ConfigError(
            "--kv-offload-disk-path needs --kv-offload-host-bytes: blocks reach the disk through the host"
        )
    if (config.kv_offload_disk_path is None) != (config.kv_offload_disk_bytes == 0):
        raise ConfigError("--kv-offload-disk-path and --kv-offload-disk-bytes need each other: give both")
    if (config.watermark == "off") != (config.watermark_key_path is None):
        raise ConfigError("--watermark and --watermark-key-path need each other: give both, or neither")
    if config.log_redact_path is not None and config.log_requests != "content":
        raise ConfigError("--log-redact-path needs --log-requests content: nothing else logs text")
    if config.kv_offload_host_bytes == 0 and config.preemption_mode == "swap":
        raise ConfigError("--preemption-mode swap needs --kv-offload-host-bytes: room for swapped blocks")
    if (config.speculative_method == "draft-model") != (config.speculative_model is not None):
        raise ConfigError(
            "--speculative-method draft-model and --speculative-model need each other: give both, or neither"
        )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"--prompt-lookup-min {config.prompt_lookup_min} is more than --prompt-lookup-max "
            f"{config.prompt_lookup_max}: lower the first or raise the second"
        )
    _check_ranks(config)
    _check_kv_transfer(config)
    _check_task(config)
    _check_adapters(config)
    tokens = config.max_num_batched_tokens
    if tokens is not None and config.max_num_seqs is not None and tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {config.max_num_seqs}: "
            "each running request needs one token of a step; raise the first or lower the second"
        )


#: Settings that have no effect without answers that grow token by token.
_OF_ANSWERS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_dtype",
    "block_size",
    "kv_cache_memory_bytes",
    "cpu_offload_gb",
    "kv_offload_host_bytes",
    "num_gpu_blocks_override",
    "speculative_method",
    "kv_role",
    "watermark",
    "chat_template",
    "max_adapters",
)


def _check_task(config: ServeConfig) -> None:
    """Refuse what a model that embeds texts does not do, and a pooling without one."""
    if config.task == "generate":
        if config.pooling != "auto":
            raise ConfigError("--pooling needs --task embed: a model that generates text pools no states")
        return
    for one in fields(config):
        if one.name in _OF_ANSWERS and getattr(config, one.name) != one.default:
            flag = "--" + one.name.replace("_", "-")
            raise ConfigError(f"{flag} does not work with --task embed: leave it out")


def _check_nodes(config: ServeConfig) -> None:
    """Check that the ranks can be spread over the nodes, which have to find each other."""
    nodes, ranks = config.nodes, config.num_ranks
    if ranks % nodes:
        raise ConfigError(
            f"--nodes {nodes} does not divide the {ranks} processes that --tensor-parallel-size times "
            "--pipeline-parallel-size are: give one that does"
        )
    if config.node_rank >= nodes:
        raise ConfigError(f"--node-rank {config.node_rank} is not below --nodes {nodes}: count from 0")
    if nodes > 1 and not (config.leader_address and config.pod_address):
        raise ConfigError(f"--nodes {nodes} needs --leader-address and --pod-address: give both")


def _check_ranks(config: ServeConfig) -> None:
    """Refuse ranks that cannot be spread over the nodes, and more than a server has."""
    _check_nodes(config)
    if config.num_ranks > MAX_RANKS:
        raise ConfigError(
            f"--tensor-parallel-size times --pipeline-parallel-size is {config.num_ranks}, more than "
            f"{MAX_RANKS} processes: lower one of them"
        )


def _check_adapters(config: ServeConfig) -> None:
    """Refuse what does not work with LoRA adapters yet."""
    if not config.max_adapters:
        if config.adapters_dir is not None:
            raise ConfigError(
                "--adapters-dir needs --max-adapters: how many adapters the device has room for"
            )
        return
    for flag, is_set in (
        ("--cpu-offload-gb", config.cpu_offload_gb > 0),
        ("--kv-role", config.kv_role != "none"),
    ):
        if is_set:
            raise ConfigError(f"{flag} does not work with --max-adapters yet: leave one of them out")


def _check_kv_transfer(config: ServeConfig) -> None:
    """Refuse roles without their addresses, and what transfers of KV blocks cannot do yet."""
    role = f"--kv-role {config.kv_role}"
    if (config.kv_role == "kv_consumer") != bool(config.kv_producers):
        raise ConfigError("--kv-role kv_consumer and --kv-producers need each other: give both, or neither")
    if config.kv_role == "kv_producer" and config.kv_transfer_port in (config.port, config.health_port):
        raise ConfigError(
            f"--kv-transfer-port {config.kv_transfer_port} is taken by another port of this server: "
            "choose a different one"
        )
    if config.kv_role == "none":
        return
    if config.kv_transport == "nixl" and find_spec(NIXL_PACKAGE) is None:
        raise ConfigError(
            "--kv-transport nixl needs the extra quire-llm[nixl], which is not installed here: install it, "
            "or choose tcp"
        )
    if not config.enable_prefix_caching:
        raise ConfigError(f"{role} needs the prefix cache: leave out --no-enable-prefix-caching")
    for flag, is_set in (
        ("--nodes", config.nodes > 1),
        ("--kv-offload-host-bytes", config.kv_offload_host_bytes > 0),
        ("--speculative-method draft-model", config.speculative_model is not None),
    ):
        if is_set:
            raise ConfigError(f"{flag} does not work with {role} yet: leave one of them out")
