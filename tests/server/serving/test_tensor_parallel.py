"""A model divided among processes: the answers of one process over HTTP."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server import tiny_model
from tests.server.launch import Server
from tests.server.models import families

EXACT = ("--dtype", "float32", "--quantization", "none")
FAMILIES = {
    "Llama": ("Llama", {"tie_word_embeddings": False}),
    "Qwen3": ("Qwen3", {"head_dim": 24, "num_attention_heads": 8}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# Chunks beside decodes, and drafts.
TIGHT = (
    *("--max-num-batched-tokens", "24", "--max-num-seqs", "6", "--speculative-method", "ngram"),
    *("--max-model-len", "400", "--num-gpu-blocks-override", "100"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


def served(model, directory, ranks, *flags):
    directory.mkdir(exist_ok=True)
    return Server(model, directory, *EXACT, "--tensor-parallel-size", str(ranks), *flags)


def answers(server, bodies):
    """Texts and log-probabilities, for all at once and then again, when prefixes are cached."""

    def ask(body):
        response = server.post("/v1/completions", {"model": "tiny", "temperature": 0, **body})
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        probabilities = choice.get("logprobs") or {}
        return choice["text"], pytest.approx(probabilities.get("token_logprobs") or [], abs=1e-3)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [*pool.map(ask, bodies), *pool.map(ask, bodies)]


def same(some, others):
    """Equal texts, and log-probabilities that differ by the order of additions."""
    return len(some) == len(others) and all(
        text == other_text and list(probabilities.expected) == other
        for (text, probabilities), (other_text, other) in zip(some, others, strict=True)
    )


def bodies(prompts):
    """Different lengths, one with logprobs, one that repeats so that drafts are right."""
    made = [{"prompt": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in prompts]
    made[0] |= {"logprobs": 2}
    made[1] |= {"logit_bias": {"7": 100}}
    return made


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_greedy_answers_of_ranks_are_those_of_one_process(tiny, tmp_path, ranks):
    wanted = bodies([f"request {i} " * (3 + 3 * i) for i in range(5)])
    found = {}
    for number in (1, ranks):
        with served(tiny, tmp_path / str(number), number, *TIGHT).wait_ready() as server:
            assert len(server.ranks()) == number
            found[number] = answers(server, wanted)
    assert same(found[ranks], found[1])


@pytest.mark.deep
@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_is_divided(family, tiny, tmp_path):
    model = tmp_path / "model"
    prefix, settings = FAMILIES[family]
    families.build(model, prefix, settings | {"vocab_size": 258})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, model)
    wanted = bodies([[(11 * i + 5 * j) % 200 + 2 for j in range(8 + 9 * i)] for i in range(3)])
    found = {}
    for ranks in (1, 2):
        with served(model, tmp_path / str(ranks), ranks).wait_ready() as server:
            found[ranks] = answers(server, wanted)
    assert same(found[2], found[1])


@pytest.mark.deep
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-parallel-size", "3"), "Set --tensor-parallel-size to one of 1, 2, 4."),
        (("--tensor-parallel-size", "2", "--device", "cuda"), "There is no CUDA device"),
        (("--tensor-parallel-size", "2", "--cpu-offload-gb", "1"), "--cpu-offload-gb is for --device cuda"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(tiny, tmp_path, flags, message):
    with Server(tiny, tmp_path, *flags) as server:
        assert server.wait_end() == 2
        text = server.log.read_text()
        assert message in text
