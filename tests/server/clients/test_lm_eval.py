"""lm-eval's local-completions model on small tasks, compared with transformers in float32 on the same model.

A wrong evaluation ends without an error too, so the tests compare the numbers.
"""

import json
import shlex

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.server.clients.conftest import SHOWN_URL, code_blocks

# In the last row the model's next token is the end of its answer, so no text follows the prompt.
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital is"
ROWS = [
    {"question": "The capital of France is", "choices": ["Paris", "London", "a banana"]},
    {"question": "Two plus two makes", "choices": ["four", "eleven and a half", "Größe, 世界 🌍"]},
    {"question": CHAT, "choices": ["Paris.", "Rome."]},
]
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}} {{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def command(url, model, folder):
    """The documentation's command, with this server and these tasks."""
    (text,) = [block for block in code_blocks("docs/clients.md", "bash") if "lm_eval run" in block]
    for shown, real in ((SHOWN_URL, url), ("./smollm2", str(model)), ("lambada_openai", ",".join(TASKS))):
        assert shown in text
        text = text.replace(shown, real)
    variable, *words = shlex.split(text.replace("\\\n", " "))
    more = ["--include_path", str(folder), "--log_samples", "--output_path", str(folder / "results")]
    return [*words, *more], dict([variable.split("=", 1)])


@pytest.fixture(scope="module")
def results_by_task(smollm2_server, smollm2, run_client, tmp_path_factory):
    """By task: lm-eval's responses for each row."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    for name, task in TASKS.items():
        question = "" if name == "perplexity" else "{{question}}"
        body = {"task": name, "doc_to_text": question, "test_split": "test", **data, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(body))  # JSON is YAML
    words, environ = command(smollm2_server.url, smollm2, folder)
    run_client(*words, **environ)
    results = {}
    for name in TASKS:
        (samples,) = (folder / "results").rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        results[name] = [row["filtered_resps"] for row in rows]
    return results


class TransformersOracle:
    """transformers, float32, one text at a time."""

    def __init__(self, directory):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def score(self, context, continuation):
        """(log-probability of the continuation, whether it is what greedy decoding gives, the next token)."""
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        positions = range(len(context) - 1, len(context) + len(continuation) - 1)
        total = sum(
            logprobs[position, token].item() for position, token in zip(positions, continuation, strict=True)
        )
        greedy = logprobs.argmax(-1).tolist()
        return total, [greedy[position] for position in positions] == continuation, greedy[-1]

    def generate(self, prompt, num_tokens):
        ids = torch.tensor([self.tokenizer.encode(prompt)])
        with torch.inference_mode():
            written = self.model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
        return self.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def oracle(smollm2):
    return TransformersOracle(smollm2)


@pytest.mark.deep
def test_log_likelihoods_and_is_greedy_equal_those_of_transformers(results_by_task, oracle):
    ended = set()
    for row, results in zip(ROWS, results_by_task["choose"], strict=True):
        for choice, (value, is_greedy) in zip(row["choices"], results, strict=True):
            context = oracle.tokenizer.encode(row["question"])
            continuation = oracle.tokenizer.encode(f"{row['question']} {choice}")[len(context) :]
            expected, greedy, following = oracle.score(context, continuation)
            assert float(value) == pytest.approx(expected, abs=1e-3), (row, choice)
            assert (is_greedy == "True") == greedy, (row, choice)
            ended.add(following == oracle.tokenizer.eos_token_id)
    assert ended == {True, False}, "rows with and without an end token after the choice"


@pytest.mark.deep
def test_rolling_log_likelihoods_equal_those_of_transformers(results_by_task, oracle):
    for row, (value,) in zip(ROWS, results_by_task["perplexity"], strict=True):
        text = oracle.tokenizer.encode(f"{row['question']} {row['choices'][0]}")
        expected, _, _ = oracle.score([oracle.tokenizer.bos_token_id], text)
        assert float(value) == pytest.approx(expected, abs=1e-3), row


@pytest.mark.deep
def test_generated_texts_equal_those_of_transformers_up_to_the_stop_strings(results_by_task, oracle):
    for row, (text,) in zip(ROWS, results_by_task["write"], strict=True):
        expected = oracle.generate(row["question"], 12)
        for stop in TASKS["write"]["generation_kwargs"]["until"]:
            expected = expected.partition(stop)[0]
        assert text == expected, row
