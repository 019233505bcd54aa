"""The committed keys of serving are those that a start meets, and all of them fit the GPUs."""

from dataclasses import asdict

import pytest

from bench import aot, serving_keys
from bench.record_serving_keys import MODELS, entry, met
from bench.serving_keys import name_of

REMEDY = "run `python -m bench.record_serving_keys` and `python -m bench.aot`, and commit bench/results"
# Small kernels, for the GPUs that no other test compiles for.
SAMPLE = [
    (kernel, gpu)
    for gpu in (86, 100, 120)
    for kernel in ("silu_mul_kernel", "best_kernel", "moe_route_kernel")
]


def committed(model: str) -> set[str]:
    return {name_of(each) for each in serving_keys.committed() if model in each["models"]}


def test_what_a_short_start_of_a_dense_model_meets_is_in_the_file() -> None:
    found = {name_of(entry(key)) for key in met(MODELS["8B"], rows=3, tokens=24, longest=128)}
    assert len(found) > 10 and found <= committed("8B"), REMEDY


@pytest.mark.kernels
@pytest.mark.parametrize("model", MODELS)
def test_the_file_has_the_keys_of_a_model_and_no_others(model: str) -> None:
    assert {name_of(entry(key)) for key in met(MODELS[model])} == committed(model), REMEDY


def test_every_model_of_the_file_is_recorded_and_every_key_is_compiled_for_its_gpus() -> None:
    assert {model for each in serving_keys.committed() for model in each["models"]} == MODELS.keys(), REMEDY
    rows = aot.table()
    missing = [
        (each.name, gpu)
        for each in serving_keys.launch_configs()
        for gpu in each.gpus
        if (each.name, gpu) not in rows
    ]
    assert missing == [], REMEDY


def test_a_tensor_that_begins_at_no_multiple_of_16_bytes_is_named() -> None:
    found = serving_keys.committed()[0]
    loose = found | {"aligned": []}
    with pytest.raises(ValueError, match="16 bytes"):
        serving_keys.launch_config(loose)


@pytest.mark.parametrize(("kernel", "gpu"), SAMPLE)
def test_a_sample_compiles_to_what_the_table_says(kernel: str, gpu: int) -> None:
    config = next(each for each in serving_keys.launch_configs() if each.kernel.fn.__name__ == kernel)
    assert asdict(aot.compiled(config, gpu)) == asdict(aot.table()[config.name, gpu]), REMEDY
