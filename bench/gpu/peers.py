"""Part: `transformers` with its continuous batching on the same shapes, in the same run."""

import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.gpu.ledger import Ledger, Row, read
from bench.gpu.place import Place
from bench.gpu.play import prompts
from bench.gpu.sizes import Sizes

TITLE = "transformers, continuous batching"
SECONDS = 120
COLUMNS = ("output tok/s", "ours in the same run", "ours over theirs")
_MODEL = "8B"


def _key(sizes: Sizes) -> str:
    return f"{_MODEL} bf16, {sizes.peer_streams} streams"


def goals(sizes: Sizes) -> dict[str, str]:
    """Of ours, over theirs."""
    return {_key(sizes): "> 10x"}


def run(place: Place, sizes: Sizes, ledger: Ledger) -> None:
    """The second of two runs, for what is compiled and captured in the first."""
    ours = (read(ledger.folder / "serving.json") or {"rows": {}})["rows"].get(_key(sizes), {}).get("output")
    ledger.measure(_key(sizes), lambda: _measure(place, sizes) | {"ours": ours})


def _measure(place: Place, sizes: Sizes) -> Row:
    document = {
        key: value for key, value in sizes.models[_MODEL].items() if key not in ("architectures", "dtype")
    }
    config = LlamaConfig(**document)
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    prompt, answer = sizes.lengths
    asked = prompts(sizes.peer_streams, sizes.peer_streams, prompt, config.vocab_size)
    generation = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Another attention than torch's would be fetched. On a CPU its cache would take half of the memory.
    is_gpu = place.device.type == "cuda"
    limits = {} if is_gpu else {"num_blocks": 8, "max_batch_tokens": 64}
    batching = ContinuousBatchingConfig(auto_switch_to_flash=False, **limits)
    seconds = 0.0
    for _ in range(2 if is_gpu else 1):
        place.synchronize()
        began = time.perf_counter()
        given = model.generate_batch(
            asked, generation_config=generation, continuous_batching_config=batching, persistent_manager=True
        )
        seconds = time.perf_counter() - began
        if len(given) < len(asked) or any(len(each.generated_tokens) != answer for each in given.values()):
            raise RuntimeError(f"{len(given)} of {len(asked)} answers came, or not as long as asked for")
    model.destroy_cached_continuous_batching_manager()
    return {"output": len(asked) * answer / seconds}


def cells(row: Row, rows: dict[str, Row]) -> dict[str, str]:
    """As the table shows them."""
    ours, theirs = row["ours"], row["output"]
    if ours is None:
        return {"output tok/s": f"{theirs:,.0f}"}
    return {
        "output tok/s": f"{theirs:,.0f}",
        "ours in the same run": f"{ours:,.0f}",
        "ours over theirs": f"{ours / theirs:.1f}x",
    }
