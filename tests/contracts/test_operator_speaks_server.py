"""What the operator renders, the server understands: its own parser reads what the pods are started with."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings

from e2e.api import profiles, specs
from quire_operator import names, reports, resources, spec
from quire_operator.errors import SpecError
from quire_operator.observed import Ref, ref
from quire_operator.resources import scaling_behavior
from quire_operator.settings import Settings
from quire_operator.spec import schema
from quire_server.config import ServeConfig, parse_args
from quire_server.core import step_limits
from quire_server.core.topology import MAX_RANKS, Topology
from quire_server.errors import ConfigError
from quire_server.health.decision import Thresholds, judge, statusz
from quire_server.health.heartbeat import Control, Heartbeat, Phase, Process, RankEcho
from quire_server.health.rank_states import Group, rank_states
from quire_sizing import memory as sizing
from tests import kubelet
from tests.examples import examples

SETTINGS = Settings(
    engine_image="registry.example/quire-server:1", allow_faults=True, credential_hosts=("*.example.com",)
)


def configured(body: specs.Body, role: str = names.ROLE_LEADER) -> ServeConfig:
    """The server's settings in a pod of this LLMDeployment."""
    return parse_args(*_command(body, role))


def _command(body: specs.Body, role: str = names.ROLE_LEADER) -> tuple[list[str], dict[str, str]]:
    """Of a pod in a role; of groups that of a worker."""
    children = resources.build(spec.parse(body), SETTINGS)
    roles = [template["metadata"]["labels"][names.LABEL_ROLE] for template in specs.pod_templates(children)]
    shown = names.ROLE_WORKER if names.ROLE_WORKER in roles else role
    template = specs.pod_templates(children)[roles.index(shown)]
    container = template["spec"]["containers"][0]
    (source,) = container["envFrom"]
    data = {ref(child): child for child in children}[Ref("ConfigMap", source["configMapRef"]["name"])]["data"]
    of_group = kubelet.OF_A_GROUP if shown == names.ROLE_WORKER else {}
    (command, *arguments), environment = kubelet.started_with(container, {**of_group, **data})
    assert command == "serve"
    return arguments, environment


def test_a_minimal_pod_is_understood() -> None:
    config = configured(specs.minimal())
    assert str(config.model) == "/models"
    assert (config.host, config.device) == ("0.0.0.0", "cpu")
    assert (config.port, config.health_port) == (names.PORT_HTTP, names.PORT_HEALTH)
    assert config.served_names == ("minimal",)
    assert str(config.termination_log) == names.PATH_TERMINATION_LOG


def test_every_field_reaches_the_server() -> None:
    config = configured(specs.FULL)
    assert str(config.model) == "/models/llama/8b"
    assert config.served_names == ("meta-llama/Llama-3.1-8B-Instruct", "llama", "llama-3")
    expected: dict[str, Any] = {
        "max_model_len": 8192,
        "max_num_seqs": 32,
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 3 * 2**29,
        "kv_cache_dtype": "fp8",
        "block_size": 32,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_queued_reqs": 64,
        "startup_timeout_seconds": 601,
        "load_stall_timeout_seconds": 120,
        "stall_timeout_seconds": 30,
        "canary_interval_seconds": 20,
        "drain_timeout_seconds": 60,
        "pre_stop_seconds": 3,
        "seed": 7,
        "log_level": "debug",
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert str(config.api_keys_dir) == names.PATH_API_KEYS
    assert str(config.canary_golden_path) == f"{names.PATH_GOLDEN_TOKENS}/{names.GOLDEN_TOKENS_FILE}"


def test_pods_of_a_gateway_s_namespaces_trust_its_keys_and_no_others_do() -> None:
    keys: dict[str, Any] = {
        "gateway_namespaces": (specs.minimal()["metadata"]["namespace"],),
        "gateway_keys_config_map": "keys",
    }
    model = spec.parse(specs.minimal())
    made = resources.build(model, dataclasses.replace(SETTINGS, **keys))
    (environment,) = (child["data"] for child in made if child["kind"] == "ConfigMap")
    config = parse_args(["/models"], environment)
    (pod,) = (child["spec"]["template"]["spec"] for child in made if child["kind"] == "Deployment")

    assert config.gateway_audience == f"{model.namespace}/{model.name}"
    (volume,) = (each for each in pod["volumes"] if each.get("configMap", {}).get("name") == "keys")
    assert volume["configMap"]["optional"] is True
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounts[volume["name"]] == str(config.gateway_keys_dir)
    elsewhere = resources.build(
        model, dataclasses.replace(SETTINGS, **{**keys, "gateway_namespaces": ("other",)})
    )
    assert elsewhere == resources.build(model, SETTINGS)


def test_the_ranks_of_a_pod_are_those_of_its_server() -> None:
    config = configured(specs.SHARDED)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (3, 2)
    variables = _command(specs.FULL)[1]
    assert not {"QUIRE_TENSOR_PARALLEL_SIZE", "QUIRE_PIPELINE_PARALLEL_SIZE"} & {*variables}


def test_decode_pods_ask_the_prefill_pods_of_their_service() -> None:
    body = specs.DISAGGREGATED[0]
    prefill, decode = (configured(body, role) for role in (names.ROLE_PREFILL, names.ROLE_LEADER))
    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    assert decode.kv_producers == (("disaggregated-prefill", prefill.kv_transfer_port),)
    assert (prefill.kv_lease_seconds, decode.local_prefill_below_tokens) == (20, 1024)
    assert prefill.kv_transfer_port == names.PORT_KV_TRANSFER
    assert (prefill.kv_transport, decode.kv_transport) == ("nixl", "nixl")
    assert "QUIRE_KV_ROLE" not in _command(specs.minimal())[1]


def test_the_processes_and_ranks_that_do_not_run_are_named_to_the_operator() -> None:
    now, thresholds = 100.0, Thresholds(stall=60.0, canary_interval=60.0, ranks=range(3))
    serving = Heartbeat(
        **{**dict.fromkeys(Heartbeat._fields, 0), "phase": Phase.SERVING, "reason": ""}
        | dict.fromkeys(("written_at", "progress_at", "proof_at"), now)
    )
    verdict = judge(serving, Control(), {}, now, thresholds)

    said = statusz(serving, verdict, now, "1")
    sample = reports.parse_statusz(json.dumps(said).encode())

    assert sample is not None
    assert list(sample.silent) == said["silent"]
    assert set(sample.silent) == {process.name.lower() for process in Process} | {"rank 1", "rank 2"}


def test_the_state_of_each_rank_is_read_by_the_operator() -> None:
    now = 100.0
    states = rank_states({Process.ENGINE: now, 1: now - 9}, {0: 7, 1: 6}, now, range(3))

    said = json.dumps({"phase": "stalled", "ranks": [state.document() for state in states]})
    sample = reports.parse_statusz(said.encode())

    assert sample is not None
    assert [(one.rank, one.last_step, one.missing) for one in sample.ranks] == [
        (0, 7, ""),
        (1, 6, "Silent"),
        (2, 0, "NotStarted"),
    ]


def test_the_largest_group_fits_what_the_operator_reads_of_a_leader() -> None:
    topology, host = Topology(MAX_RANKS), "m-0-1" + "x" * 248
    hosts, echoes = dict.fromkeys(range(MAX_RANKS), host), {13: RankEcho(9, 98.0, 0.25, 80.0, 1 << 50)}
    group = Group(topology, hosts, echoes, 99.0)
    states = rank_states({Process.ENGINE: 100.0}, {0: 10}, 100.0, range(1), group=group)

    said = json.dumps({"phase": "serving", "ranks": [state.document() for state in states]}).encode()
    sample = reports.parse_statusz(said)

    assert sample is not None and len(said) < reports.MAX_STATUSZ_BYTES / 2
    assert len(sample.ranks) == MAX_RANKS
    assert sample.ranks[13] == reports.RankReport(rank=13, last_step=9, host=host, step_micros=250_000)


def test_a_worker_of_a_group_knows_its_place_and_its_leader() -> None:
    config = configured(specs.GROUPED)
    assert (config.nodes, config.node_rank, config.local_ranks) == (2, 1, range(3, 6))
    assert (config.leader_address, config.pod_address) == ("m-0.m-0.default", "10.244.0.7")
    assert config.start_delay_seconds == 0


def test_a_worker_of_a_group_on_gpus_has_as_many_ranks_as_its_pod_has_accelerators() -> None:
    config = configured(specs.GROUPED_ON_GPUS)
    assert (config.device, config.nodes, config.node_rank, config.local_ranks) == ("cuda", 2, 1, range(8, 16))
    *_, workload = resources.build(
        spec.parse(specs.GROUPED_ON_GPUS), SETTINGS, **profiles.named_by(specs.GROUPED_ON_GPUS)
    )
    for template in specs.pod_templates([workload]):
        limits = template["spec"]["containers"][0]["resources"]["limits"]
        assert limits["example.com/h100"] == str(len(config.local_ranks))


def test_operator_and_server_have_the_same_largest_group() -> None:
    assert schema.MAX_RANKS == MAX_RANKS


@settings(max_examples=examples(150))
@given(specs.random_bodies())
def test_whatever_the_api_admits_the_server_can_be_started_with(body: specs.Body) -> None:
    engine = {key: value for key, value in body["spec"].get("engine", {}).items() if key != "extraArgs"}
    for role in spec.parse(body).roles:
        configured({**body, "spec": {**body["spec"], "engine": engine}}, role.role)


def test_defaults_of_the_api_are_the_servers_own() -> None:
    """But for the time before a stop, which only a Service needs, the address, and what is mounted."""
    config, own = configured(specs.minimal()), ServeConfig(model=configured(specs.minimal()).model)
    differ = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(own, f.name)}
    assert differ == {"host", "device", "pre_stop_seconds", "served_model_name", "canary_golden_path"}


def test_the_limits_of_a_step_that_operator_and_sizing_assume_are_the_servers() -> None:
    large = step_limits.LARGE_GPU
    for accelerator, memory in (
        ({}, None),
        ({"gpu": {}}, 24 << 30),
        ({"profileRef": {"name": "h100"}}, large),
    ):
        model = spec.parse(specs.minimal(resources={"cpu": "1", "memory": "1Gi", **accelerator}))
        assert scaling_behavior.batch(model) == step_limits.of_device(memory).requests
    assert large == sizing.LARGE
    for memory in (24 << 30, large - 1, large, 141 << 30):
        assert sizing.step_tokens(memory) == step_limits.of_device(memory).tokens


@pytest.mark.parametrize("flag", ["--hos", "--served-model", "--PORT", "--max_model_len", "--host", "-h"])
def test_no_spelling_of_another_flag_gets_to_the_server(flag: str) -> None:
    with pytest.raises(SpecError, match="extraArgs"):
        _command(specs.minimal(engine={"extraArgs": [f"{flag}=1"]}))


def test_a_value_in_extra_args_is_never_read_as_a_flag() -> None:
    arguments, environment = _command(specs.minimal(engine={"extraArgs": ["--log-level", "host"]}))
    with pytest.raises(ConfigError, match="log-level"):
        parse_args(arguments, environment)


def test_a_flag_in_extra_args_beats_nothing_that_the_operator_relies_on() -> None:
    config = configured(
        specs.minimal(engine={"extraArgs": ["--max-num-batched-tokens=512", "--log-level=debug"]})
    )
    assert (config.max_num_batched_tokens, config.log_level) == (512, "debug")
