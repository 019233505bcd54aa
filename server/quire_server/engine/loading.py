"""Loads the model: settings become runner and scheduler options, progress goes to the heartbeat.

The injected faults of loading are here.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from quire_server.config import ServeConfig
from quire_server.core import pipeline, step_limits
from quire_server.core.config import Batching, PreemptionMode, SpeculationConfig, SpeculativeMethod
from quire_server.core.policy import Policy
from quire_server.core.scheduler import SchedulerConfig
from quire_server.core.step_limits import StepLimits
from quire_server.core.watermark import Watermark, read_key
from quire_server.engine import golden_tokens
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.engine.rank_faults import RankFaults
from quire_server.engine.rank_group import RankGroup
from quire_server.fault_injection import Faults
from quire_server.health import engine_report
from quire_server.health.engine_report import EffectiveConfig
from quire_server.layers.int8_linear import native_kernels
from quire_server.runner import fingerprint
from quire_server.runner.model_runner import (
    ModelRunner,
    RunnerConfig,
    device_of,
    gpu_bytes,
)
from quire_server.runner.pooling_runner import PoolingRunner
from quire_server.runner.ranks import Membership

logger = logging.getLogger(__name__)

_POOLED_STEP_TOKENS = 8192  # on a GPU: no decode waits for such a step


def load(config: ServeConfig, run_dir: Path, heartbeat: HeartbeatWriter, faults: Faults) -> ModelRunner:
    """The model runner, with weights loaded and graphs captured; if there are several ranks, all of them are
    ready for steps. Raises errors of `quire_server.errors`.
    """
    if faults.due("crash_on_load", float("inf")):
        raise RuntimeError("the fault crash_on_load")
    on_progress = _progress_with_faults(heartbeat, faults)
    if config.num_ranks == 1:
        runner = ModelRunner.load(config.model, runner_config(config), on_progress)
        runner.capture(lambda captured, wanted: heartbeat.progressed())
        return runner
    topology, options = config.topology(0), runner_config(config)
    device = device_of(options, topology)  # first: there may be too few GPUs
    group, communicator = RankGroup.gather(
        run_dir,
        config,
        heartbeat.rank_lost,
        heartbeat.rank_stepped,
        heartbeat.rank_echoed,
        RankFaults(faults, 0),
    )
    timeout, hosts = config.startup_timeout_seconds, {0: socket.gethostname()}

    def loaded(rank: int, host: str) -> None:
        hosts[rank] = host
        engine_report.write_hosts(run_dir, hosts)

    ranks = Membership(
        topology,
        communicator,
        lambda num_blocks, shared: (
            group.agree_on_blocks(num_blocks, heartbeat.progressed, timeout, shared, loaded),
            shared,
        ),
    )
    runner = ModelRunner.load(config.model, options, on_progress, ranks=ranks, followers=group, device=device)
    runner.capture(lambda captured, wanted: heartbeat.progressed())
    if not group.wait_prepared(timeout):
        runner.disable_replay()
    return runner


def load_pooling(config: ServeConfig, heartbeat: HeartbeatWriter, faults: Faults) -> PoolingRunner:
    """The runner of ``--task embed``, with weights loaded. Raises errors of `quire_server.errors`."""
    if faults.due("crash_on_load", float("inf")):
        raise RuntimeError("the fault crash_on_load")
    on_progress = _progress_with_faults(heartbeat, faults)
    return PoolingRunner.load(config.model, runner_config(config), config.pooling, on_progress)


def pooling_scheduler_config(config: ServeConfig, runner: PoolingRunner) -> SchedulerConfig:
    """Whole texts, as many as a step's tokens allow; one that has more has a step of its own."""
    limits = _step_limits(config)
    return SchedulerConfig(
        max_num_seqs=limits.requests,
        max_num_batched_tokens=limits.tokens,
        max_model_len=runner.max_model_len + 1,  # a text, and the token that stands for its vector
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        pools=True,
        policy=Policy(config.scheduling_policy),
    )


def runner_config(config: ServeConfig) -> RunnerConfig:
    """The runner's options, the same on every rank."""
    limits = _step_limits(config)
    return RunnerConfig(
        device=config.device,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        block_size=config.block_size,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        shares_kv_cache=config.kv_role != "none",
        kv_staging_bytes=config.kv_staging_bytes,
        num_blocks_override=config.num_gpu_blocks_override,
        max_num_seqs=limits.requests,
        max_num_batched_tokens=limits.tokens,
        max_model_len=config.max_model_len,
        kv_offload_host_bytes=config.kv_offload_host_bytes,
        kv_offload_disk_path=config.kv_offload_disk_path,
        kv_offload_disk_bytes=config.kv_offload_disk_bytes,
        watermark=_watermark(config),
        speculative_model=config.speculative_model,
        num_speculative_tokens=_num_drafts(config),
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        cpu_offload_gb=config.cpu_offload_gb,
        max_adapters=config.max_adapters,
        max_adapter_rank=config.max_adapter_rank,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )


def scheduler_config(config: ServeConfig, runner: ModelRunner) -> SchedulerConfig:
    """The scheduler's configuration for this runner."""
    limits = _step_limits(config)
    found = SchedulerConfig(
        max_num_seqs=limits.requests,
        max_num_batched_tokens=limits.tokens,
        max_model_len=runner.max_model_len,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        num_host_slots=runner.num_host_slots,
        num_disk_slots=runner.num_disk_slots,
        num_staging_slots=runner.num_staging_slots,
        preemption_mode=PreemptionMode(config.preemption_mode),
        seed=config.seed,
        policy=Policy(config.scheduling_policy),
        batching=Batching(config.batching),
        speculation=_speculation(config),
        num_adapter_slots=config.max_adapters,
        pipeline_size=config.pipeline_parallel_size,
    )
    if why := pipeline.why_idle(found):
        logger.warning("stages of the model will be idle", extra={"why": why})
    return found


def effective(config: ServeConfig, runner: ModelRunner | PoolingRunner) -> EffectiveConfig:
    """What is served, where the settings leave it to the model and the machine."""
    if isinstance(runner, PoolingRunner):
        stored, longest = runner.stored_dtype, runner.longest
    else:
        stored, longest = runner.model_config.dtype, runner.model_config.max_position
    is_inexact = {
        "dtype": config.dtype == "auto" and stored != runner.dtype == "bfloat16",
        "quantization": config.quantization == "auto" and runner.quantization == "int8",
    }
    return EffectiveConfig(
        max_model_len=runner.max_model_len,
        wanted_model_len=config.max_model_len or longest,
        dtype=runner.dtype,
        quantization=runner.quantization,
        inexact_defaults=tuple(name for name, inexact in is_inexact.items() if inexact),
        native_kernels="" if runner.is_on_gpu else native_kernels(),
    )


def canary_fingerprint(config: ServeConfig, runner: ModelRunner | PoolingRunner) -> str:
    """Of everything that the tokens of the canary depend on."""
    facts = fingerprint.facts(
        config.model,
        runner_config(config),
        is_gpu=runner.is_on_gpu,
        max_model_len=runner.max_model_len,
        dtype=runner.dtype,
        quantization=runner.quantization,
        **(runner.facts if isinstance(runner, PoolingRunner) else {}),
    )
    found = golden_tokens.fingerprint(facts)
    logger.info("canary", extra={"fingerprint": found, **facts})
    return found


def _speculation(config: ServeConfig) -> SpeculationConfig | None:
    method = SpeculativeMethod(config.speculative_method)
    if method is SpeculativeMethod.NONE:
        return None
    return SpeculationConfig(
        method, config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
    )


def _num_drafts(config: ServeConfig) -> int:
    speculation = _speculation(config)
    return 0 if speculation is None else speculation.num_tokens


def _watermark(config: ServeConfig) -> Watermark | None:
    if config.watermark_key_path is None:
        return None
    return Watermark(read_key(config.watermark_key_path), config.watermark_gamma, config.watermark_delta)


def _step_limits(config: ServeConfig) -> StepLimits:
    gpu_memory = gpu_bytes(config.device)
    default = step_limits.of_device(gpu_memory)
    if config.task == "embed" and gpu_memory is not None:
        default = default._replace(tokens=_POOLED_STEP_TOKENS)
    return step_limits.limits(config.max_num_seqs, config.max_num_batched_tokens, default)


def _progress_with_faults(heartbeat: HeartbeatWriter, faults: Faults) -> Callable[[int, int], None]:
    """Reports progress to the heartbeat, with the injected faults of loading."""
    slow = faults.get("slow_load")

    def progress(loaded_bytes: int, total_bytes: int) -> None:
        if slow is not None and total_bytes:
            for tenth in range(1, 11):
                bytes_then = total_bytes * tenth // 10
                if heartbeat.sample.loaded_bytes < bytes_then <= loaded_bytes:
                    heartbeat.loaded(bytes_then, total_bytes)
                    faults.mark_injected("slow_load")
                    time.sleep(slow.after)
        heartbeat.loaded(loaded_bytes, total_bytes)
        if faults.due("stalled_load", loaded_bytes):
            while True:
                time.sleep(60)

    return progress
