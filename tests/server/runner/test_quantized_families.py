"""Every family in every format of quantised checkpoints, experts too, over every dtype of the KV cache."""

import itertools
from pathlib import Path

import pytest
import torch
import transformers

from tests.server.models import families, quantized_directories, quantized_matrix
from tests.server.models.quantized_matrix import FAMILIES, FORMATS, KV_DTYPES
from tests.server.models.variants import VOCAB
from tests.server.runner.in_process import InProcessEngine, greedy, load


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_directories.write(tmp_path_factory.mktemp("quantised"), FAMILIES)


@pytest.mark.deep
@pytest.mark.one_in(12)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_answers_are_those_of_transformers_with_the_weights_that_others_read(
    family: str, format_: str, written: Path
) -> None:
    quantised, plain = written / family / format_, written / family / f"{format_}.float"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    families.assert_same(quantised, model)


@pytest.mark.deep
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "format_", "dtype"), quantized_matrix.cases(), ids=lambda value: str(value).replace(" ", "_")
)
def test_a_quantised_model_over_a_quantised_cache_is_its_float_model_over_that_cache(
    family: str, format_: str, dtype: str, written: Path
) -> None:
    answers = []
    for name in (format_, f"{format_}.float"):
        runner = load(written / family / name, kv_cache_dtype=dtype, kv_offload_host_bytes=4 << 20)
        engine = InProcessEngine(runner, **families.HARD)
        tokens = engine.generate(families.PROMPTS, greedy(12, logprobs=VOCAB))
        tops = [sorted(entry.top) for entry in engine.logprobs["0"]]
        answers.append((tokens, torch.tensor([[value for _, value in top] for top in tops])))
    (ours, logprobs), (expected, exact) = answers
    assert ours == expected
    torch.testing.assert_close(logprobs, exact, atol=1e-4, rtol=0)


def test_every_family_and_every_format_meets_every_dtype() -> None:
    cases = quantized_matrix.cases()
    assert {case[0::2] for case in cases} == set(itertools.product(FAMILIES, KV_DTYPES))
    assert {case[1:] for case in cases} == set(itertools.product(FORMATS, KV_DTYPES))
