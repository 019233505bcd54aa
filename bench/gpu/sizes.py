"""How large everything is: as on the machine that the goals are for, and tiny."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Model = Mapping[str, Any]  # a config.json


@dataclass(frozen=True, slots=True)
class Sizes:
    """One set of them. Attention's are (sequences, tokens of each), those of serving (prompt, answer)."""

    tokens: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head: int
    vocab: int
    rows: int  # that are sampled
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    prefix: tuple[int, int]  # new tokens, cached ones
    square: int  # side of the product that gives the ceiling
    copied: int  # bytes of the copy that does
    cold: int  # bytes after which nothing is left in a cache
    experts: tuple[int, int, int]  # how many, hidden, intermediate
    models: Mapping[str, Model]
    streams: tuple[int, ...]
    lengths: tuple[int, int]
    long_prompts: tuple[int, ...]
    peer_streams: int
    arrivals: tuple[float, int, int, int]  # a second, how many, tokens of each prompt and answer
    skewed: tuple[int, int, int]  # how many sequences of which length, beside one of the last
    group: int = 128  # inputs that share a scale of 4-bit weights
    block: int = 64


def llama(
    hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, **more: Any
) -> Model:
    q_heads, kv_heads, size = heads
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "max_position_embeddings": 16_384, "tie_word_embeddings": False,
        "hidden_act": "silu", "dtype": "bfloat16", **more,
    }  # fmt: skip


FULL = Sizes(
    tokens=8192,
    hidden=4096,
    inner=14_336,
    q_heads=32,
    kv_heads=8,
    head=128,
    vocab=128_256,
    rows=64,
    decodes=((64, 4096), (32, 4096), (8, 4096), (1, 4096), (1, 32_768)),
    prompts=((4, 2048), (1, 8192)),
    prefix=(512, 7680),
    square=8192,
    copied=1 << 30,
    cold=256 << 20,
    experts=(128, 2048, 768),
    models={
        "8B": llama(4096, 14_336, 32, (32, 8, 128), 128_256),
        "1B": llama(2048, 8192, 16, (32, 8, 64), 128_256, tie_word_embeddings=True),
    },
    streams=(1, 8, 32, 128, 256),
    lengths=(128, 128),
    long_prompts=(2048, 8192),
    peer_streams=32,
    arrivals=(20.0, 200, 512, 128),
    skewed=(31, 200, 32_768),
)
TINY = Sizes(
    tokens=3,
    hidden=64,
    inner=64,
    q_heads=4,
    kv_heads=2,
    head=64,
    vocab=320,
    rows=2,
    decodes=((2, 20),),
    prompts=((1, 20),),
    prefix=(3, 17),
    square=16,
    copied=1 << 10,
    cold=1,
    experts=(4, 64, 64),
    models={
        "8B": llama(64, 128, 2, (4, 2, 16), 320),
        "1B": llama(64, 128, 1, (4, 2, 16), 320, tie_word_embeddings=True),
    },
    streams=(2,),
    lengths=(5, 3),
    long_prompts=(20,),
    peer_streams=2,
    arrivals=(20.0, 2, 5, 3),
    skewed=(1, 4, 20),
    group=32,
    block=16,
)
