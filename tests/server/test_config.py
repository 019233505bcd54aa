"""Settings: flags, variables, and errors that name what to change."""

from pathlib import Path

import pytest

from quire_server.config import ServeConfig, parse_args
from quire_server.errors import ConfigError


def test_a_model_alone_gets_every_default():
    assert parse_args(["/models/m"], {}) == ServeConfig(model=Path("/models/m"))


def test_every_flag_is_a_variable_and_the_flag_wins():
    environ = {"QUIRE_MAX_NUM_SEQS": "7", "QUIRE_PORT": "9000", "QUIRE_SERVED_MODEL_NAME": "a,b"}
    config = parse_args(["m", "--max-num-seqs", "9"], environ)
    assert (config.max_num_seqs, config.port, config.served_names) == (9, 9000, ("a", "b"))


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [
        ([], {}, True),
        (["--no-enable-prefix-caching"], {}, False),
        ([], {"QUIRE_ENABLE_PREFIX_CACHING": "false"}, False),
        (["--enable-prefix-caching"], {"QUIRE_ENABLE_PREFIX_CACHING": "false"}, True),
    ],
)
def test_a_switch_is_on_off_or_left_alone(flag, variable, expected):
    assert parse_args(["m", *flag], variable).enable_prefix_caching is expected


def test_the_model_directory_names_the_model_by_default():
    assert parse_args(["/models/smollm2/"], {}).served_names == ("smollm2",)


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        ([], {}, "MODEL"),
        (["m", "--max-num-seqs", "many"], {}, "--max-num-seqs"),
        (["m", "--max-num-seqs", "0"], {}, "--max-num-seqs"),
        (["m", "--max-num", "4"], {}, "--max-num"),
        (["m", "--no-such-flag"], {}, "--no-such-flag"),
        (["m", "--dtype", "float16"], {}, "--dtype"),
        (["m", "--log-level=$(touch x)"], {}, "--log-level"),
        (["m"], {"QUIRE_PORT": "tcp://10.0.0.1:80"}, "QUIRE_PORT"),
        (["m"], {"QUIRE_PROT": "80"}, "QUIRE_PROT"),
        (["m"], {"QUIRE_ENABLE_PREFIX_CACHING": "yes"}, "QUIRE_ENABLE_PREFIX_CACHING"),
        (["m"], {"QUIRE_STALL_TIMEOUT_SECONDS": "nan"}, "QUIRE_STALL_TIMEOUT_SECONDS"),
        (["m"], {"QUIRE_API_KEYS_DIR": ""}, "QUIRE_API_KEYS_DIR"),
        (["m", "--port", "8001"], {}, "--health-port"),
        (["m", "--max-num-batched-tokens", "8", "--max-num-seqs", "9"], {}, "--max-num-batched-tokens"),
        (
            ["m", "--kv-offload-disk-path", "/d", "--kv-offload-disk-bytes", "9"],
            {},
            "--kv-offload-host-bytes",
        ),
        (
            ["m", "--kv-offload-disk-path", "/d", "--kv-offload-host-bytes", "9"],
            {},
            "--kv-offload-disk-bytes",
        ),
        (["m", "--kv-offload-disk-bytes", str(2**46 + 1)], {}, "--kv-offload-disk-bytes"),
        (["m", "--preemption-mode", "swap"], {}, "--kv-offload-host-bytes"),
        (["m", "--speculative-method", "draft-model"], {}, "--speculative-model"),
        (["m", "--speculative-model", "/d"], {}, "--speculative-method"),
        (["m", "--speculative-method", "eagle"], {}, "--speculative-method"),
        (["m", "--num-speculative-tokens", "17"], {}, "--num-speculative-tokens"),
        (["m", "--prompt-lookup-min", "5"], {}, "--prompt-lookup-max"),
        (["m", "--preemption-mode", "pray"], {}, "--preemption-mode"),
        (["m", "--watermark", "always"], {}, "--watermark-key-path"),
        (["m", "--watermark-key-path", "/k"], {}, "--watermark"),
        (["m", "--watermark-gamma", "1"], {}, "--watermark-gamma"),
        (["m", "--generation-config", "vllm"], {}, "--generation-config"),
        (["m"], {"QUIRE_FAULT": "stuck_step"}, "QUIRE_ALLOW_FAULTS"),
        (["m"], {"QUIRE_FAULT": "typo", "QUIRE_ALLOW_FAULTS": "1"}, "typo"),
    ],
)
def test_what_is_wrong_is_named(argv, environ, named):
    with pytest.raises(ConfigError, match=named.replace("$", r"\$").replace("(", r"\(")):
        parse_args(argv, environ)


def test_variables_of_others_are_no_business_of_ours():
    assert parse_args(["m"], {"PATH": "/bin", "VLLM_PORT": "1", "QUIRE": "x"}) == parse_args(["m"], {})


@pytest.mark.parametrize(
    "address", ["http://host:70000", "http://host:0", "http://host:x", "host:4318", "http://"]
)
def test_an_address_that_cannot_be_one_is_refused_with_an_example(address):
    with pytest.raises(ConfigError, match="must be like http://HOST:PORT"):
        parse_args(["m", "--otlp-endpoint", address], {})


GROUP = ("m", "--tensor-parallel-size", "3", "--pipeline-parallel-size", "2")
ADDRESSES = ("--leader-address", "m-0.m", "--pod-address", "10.0.0.7")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "4", *ADDRESSES), "does not divide the 6 processes"),
        (("--nodes", "2", "--node-rank", "2", *ADDRESSES), "not below --nodes 2"),
        (("--nodes", "2", *ADDRESSES[:2]), "--pod-address"),
    ],
)
def test_a_group_that_cannot_be_is_refused_at_the_start(arguments, said):
    with pytest.raises(ConfigError, match=said):
        parse_args([*GROUP, *arguments], {})


def test_every_node_has_ranks_of_its_own_and_all_have_the_same_common_settings():
    nodes = [
        parse_args([*GROUP, "--nodes", "2", "--node-rank", str(rank), *ADDRESSES[:3], f"10.0.0.{rank}"], {})
        for rank in (0, 1)
    ]
    assert [node.local_ranks for node in nodes] == [range(3), range(3, 6)]
    assert [node.is_leader for node in nodes] == [True, False]
    assert nodes[0].common == nodes[1].common != nodes[0]


@pytest.mark.parametrize(
    "flags",
    [
        ("--cpu-offload-gb", "1"),
        ("--kv-role", "kv_producer"),
    ],
)
def test_adapters_are_refused_where_they_do_not_work(flags):
    with pytest.raises(ConfigError, match=rf"{flags[0]} does not work with --max-adapters yet"):
        parse_args(["m", "--max-adapters", "2", *flags], {})


def test_a_directory_of_adapters_needs_places_for_them():
    with pytest.raises(ConfigError, match="--adapters-dir needs --max-adapters"):
        parse_args(["m", "--adapters-dir", "/adapters"], {})


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "2"],
        ["--pipeline-parallel-size", "2"],
        ["--speculative-method", "ngram"],
        ["--speculative-method", "draft-model", "--speculative-model", "/d"],
        ["--kv-offload-host-bytes", "4096"],
        [
            "--kv-offload-host-bytes",
            "4096",
            "--kv-offload-disk-path",
            "/d",
            "--kv-offload-disk-bytes",
            "4096",
        ],
        ["--watermark", "on-request", "--watermark-key-path", "/k"],
        ["--kv-cache-dtype", "int8"],
        ["--kv-cache-memory-bytes", "4096"],
        ["--kv-role", "kv_producer"],
        ["--chat-template", "/t.jinja"],
        ["--max-adapters", "1"],
    ],
    ids=lambda flags: flags[0],
)
def test_what_a_model_that_embeds_texts_does_not_do_is_refused_by_name(flags):
    assert parse_args(["m", *flags], {}).task == "generate"
    with pytest.raises(ConfigError, match=f"{flags[0]} does not work with --task embed: leave it out"):
        parse_args(["m", "--task", "embed", *flags], {})


def test_a_pooling_needs_a_model_that_embeds_texts():
    assert parse_args(["m", "--task", "embed", "--pooling", "mean"], {}).pooling == "mean"
    with pytest.raises(ConfigError, match="--pooling needs --task embed"):
        parse_args(["m", "--pooling", "mean"], {})
