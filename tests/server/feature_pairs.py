"""The features that each test combines, as data for the generated documentation.

Each entry names a test and the features that one case of it uses *together*, so that every pair of them is
covered. Only tests that fail if one of the features was not used belong here.
"""

from collections.abc import Iterator
from itertools import combinations

FEATURES = (
    "int8 arithmetic",
    "int4 arithmetic",
    "quantised checkpoint",
    "FP8 or int8 KV cache",
    "host tier",
    "disk tier",
    "preemption, recomputed",
    "preemption, swapped",
    "pinned prefixes",
    "drafts from the prompt",
    "drafts of a draft model",
    "grammar",
    "calls of tools",
    "budget of thoughts",
    "prompt_logprobs",
    "penalties, biases, bans",
    "watermark",
    "priorities",
    "shortest job first",
    "static batching",
    "several ranks",
    "LoRA adapters",
    "embeddings",
)
#: Pairs of values of one setting, and what cannot come together: a text is embedded in one step.
EXCLUSIVE = (
    ("int8 arithmetic", "int4 arithmetic"),
    ("preemption, recomputed", "preemption, swapped"),
    ("drafts from the prompt", "drafts of a draft model"),
    ("priorities", "shortest job first"),
    ("embeddings", "preemption, recomputed"),
    ("embeddings", "preemption, swapped"),
)
_NO_FLAG = (
    "tests/server/test_config.py",
    "test_what_a_model_that_embeds_texts_does_not_do_is_refused_by_name",
)
_NO_ROUTE = (
    "tests/server/embeddings/test_embeddings.py",
    "test_a_path_of_generation_names_the_task_of_the_server",
)
#: Combinations that the server refuses at its start, or by the answer to a request.
REFUSED = (
    (
        ("tests/server/runner/test_quantization.py", "test_a_quantised_checkpoint_is_not_rounded_twice"),
        ("int8 arithmetic", "quantised checkpoint"),
    ),
    *(
        (_NO_FLAG, ("embeddings", feature))
        for feature in (
            "FP8 or int8 KV cache",
            "host tier",
            "disk tier",
            "drafts from the prompt",
            "drafts of a draft model",
            "watermark",
            "several ranks",
            "LoRA adapters",
        )
    ),
    *(
        (_NO_ROUTE, ("embeddings", feature))
        for feature in (
            "pinned prefixes",
            "grammar",
            "calls of tools",
            "budget of thoughts",
            "prompt_logprobs",
            "penalties, biases, bans",
        )
    ),
)

_RUNNER, _CORE = "tests/server/runner/", "tests/server/core/"
_NGRAM, _DRAFT_MODEL = "drafts from the prompt", "drafts of a draft model"
_RECOMPUTED, _SWAPPED = "preemption, recomputed", "preemption, swapped"
_OFFLOAD_AND_CACHE = (
    _RUNNER + "test_kv_cache_dtypes.py",
    "test_answers_do_not_depend_on_chunks_batches_prefix_hits_preemption_or_tiers",
)
_FORMATS_AND_CACHE = (
    _RUNNER + "test_quantized_families.py",
    "test_a_quantised_model_over_a_quantised_cache_is_its_float_model_over_that_cache",
)
_OFFLOAD = (_RUNNER + "test_kv_offload.py", "test_no_answer_comes_from_anothers_prompt")
_DRAFTS = (_RUNNER + "test_speculation.py", "test_greedy_answers_are_those_of_transformers")
_GRAMMARS = (
    _RUNNER + "test_structured_outputs_with_drafts.py",
    "test_drafts_change_no_answer_that_follows_a_grammar",
)
_SCORES = (
    _RUNNER + "test_prompt_logprobs.py",
    "test_every_prompt_token_has_the_probability_that_transformers_gives_it",
)
_TOOLS = "tests/server/serving/test_tools.py"
_CALLS = (_TOOLS, "test_required_calls_satisfy_the_schema_and_streams_equal_whole_answers")
_DRAFTED_CALLS = (_TOOLS, "test_drafts_change_neither_thoughts_with_a_budget_nor_calls")
_DETECTOR = (
    "tests/server/serving/test_sampling.py",
    "test_the_detector_finds_watermarked_texts_with_their_key_and_no_others",
)

_ADAPTERS = (
    _RUNNER + "test_adapters.py",
    "test_adapters_survive_chunks_preemption_tiers_and_drafts",
)
_ADAPTERS_OF_RANKS = (
    _RUNNER + "test_adapters.py",
    "test_ranks_and_stages_answer_with_adapters_as_one_rank",
)
_ROUNDED_ADAPTERS = (_RUNNER + "test_adapters.py", "test_rounded_layers_have_adapters_beside_them")

_ALL_AT_ONCE = (
    _RUNNER + "test_feature_pairs.py",
    "test_grammars_penalties_and_scored_prompts_survive_drafts_and_preemption",
)
_REQUEST_FEATURES = ("grammar", "penalties, biases, bans", "prompt_logprobs")

_RANKS = ("tests/server/engine/test_ranks.py", "test_ranks_give_the_tokens_and_logprobs_of_one_rank")
_TIERS_OF_RANKS = (
    _RUNNER + "test_kv_offload_of_ranks.py",
    "test_ranks_keep_their_heads_in_their_tiers",
)
_CACHES_OF_RANKS = (
    _RUNNER + "test_kv_cache_dtypes.py",
    "test_ranks_answer_nearly_as_one_over_the_same_cache",
)
_REQUESTS_OF_RANKS = (
    "tests/server/serving/test_features_of_ranks.py",
    "test_every_kind_of_request_gets_the_answer_of_one_process",
)
_FORMATS_OF_RANKS = (
    "tests/server/models/test_sharding.py",
    "test_ranks_together_compute_the_logits_of_the_whole_quantised_model",
)
_INT8_OF_RANKS = (
    _RUNNER + "test_recorded_decode_of_ranks.py",
    "test_a_replay_of_ranks_equals_the_layers_one_by_one_and_the_whole_model",
)
_INT4_OF_RANKS = (
    "tests/server/models/test_sharding.py",
    "test_four_bits_are_multiplied_as_stored_by_one_rank_and_by_two",
)

#: Tests of the whole engine with a model.
WORKS: tuple[tuple[tuple[str, str], tuple[str, ...]], ...] = (
    (_OFFLOAD_AND_CACHE, ("FP8 or int8 KV cache", "host tier", "disk tier", _RECOMPUTED)),
    (_OFFLOAD_AND_CACHE, ("FP8 or int8 KV cache", "host tier", _SWAPPED)),
    (_FORMATS_AND_CACHE, ("quantised checkpoint", "FP8 or int8 KV cache", "host tier", _SWAPPED)),
    (_OFFLOAD, ("host tier", "disk tier", _RECOMPUTED)),
    (_OFFLOAD, ("host tier", "disk tier", _SWAPPED)),
    *((_DRAFTS, (method, "host tier", _SWAPPED)) for method in (_NGRAM, _DRAFT_MODEL)),
    *((_DRAFTS, (method, "host tier", _RECOMPUTED)) for method in (_NGRAM, _DRAFT_MODEL)),
    *((_GRAMMARS, (method, "grammar", _RECOMPUTED)) for method in (_NGRAM, _DRAFT_MODEL)),
    (_SCORES, ("prompt_logprobs", _RECOMPUTED)),
    (_SCORES, ("prompt_logprobs", "host tier", _SWAPPED)),
    *(
        (_ALL_AT_ONCE, (*_REQUEST_FEATURES, method, "host tier", mode))
        for method in (_NGRAM, _DRAFT_MODEL)
        for mode in (_RECOMPUTED, _SWAPPED)
    ),
    (_DETECTOR, ("watermark", "penalties, biases, bans")),
    (_CALLS, ("calls of tools", "grammar")),
    (_DRAFTED_CALLS, ("calls of tools", _NGRAM)),
    (_DRAFTED_CALLS, ("budget of thoughts", _NGRAM)),
    (_DRAFTED_CALLS, ("budget of thoughts", "penalties, biases, bans")),
    *(
        (_RANKS, ("several ranks", "watermark", "prompt_logprobs", "penalties, biases, bans", *more))
        for more in (
            (_NGRAM,),
            (_DRAFT_MODEL,),
            (_RECOMPUTED,),
            ("static batching",),
            ("shortest job first",),
        )
    ),
    (_RANKS, ("several ranks", _DRAFT_MODEL, "host tier", _SWAPPED)),
    *(
        (_ALL_AT_ONCE, (*_REQUEST_FEATURES, "several ranks", method, "host tier", mode))
        for method in (_NGRAM, _DRAFT_MODEL)
        for mode in (_RECOMPUTED, _SWAPPED)
    ),
    *(
        (_TIERS_OF_RANKS, ("several ranks", "host tier", "disk tier", mode))
        for mode in (_RECOMPUTED, _SWAPPED)
    ),
    (_CACHES_OF_RANKS, ("several ranks", "FP8 or int8 KV cache", "host tier", _SWAPPED)),
    *(
        (_REQUESTS_OF_RANKS, ("several ranks", "priorities", _DRAFT_MODEL, *more))
        for more in (("pinned prefixes",), ("calls of tools", "grammar"), ("budget of thoughts",))
    ),
    (_FORMATS_OF_RANKS, ("several ranks", "quantised checkpoint")),
    (_INT8_OF_RANKS, ("several ranks", "int8 arithmetic")),
    (_INT4_OF_RANKS, ("several ranks", "int4 arithmetic", "quantised checkpoint")),
    *(
        (_ADAPTERS, ("LoRA adapters", method, "host tier", mode))
        for method in (_NGRAM, _DRAFT_MODEL)
        for mode in (_RECOMPUTED, _SWAPPED)
    ),
    (_ADAPTERS_OF_RANKS, ("LoRA adapters", "several ranks", "host tier", _SWAPPED)),
    (_ROUNDED_ADAPTERS, ("LoRA adapters", "int8 arithmetic")),
    (_ROUNDED_ADAPTERS, ("LoRA adapters", "int4 arithmetic")),
    (
        (
            "tests/server/embeddings/test_pooling_runner.py",
            "test_weights_that_are_rounded_to_int8_turn_a_vector_by_little",
        ),
        ("embeddings", "int8 arithmetic"),
    ),
)

_SCHEDULER_MACHINE = (_CORE + "test_scheduler_machine.py", "SchedulerMachine")
_OFFLOAD_MACHINE = (_CORE + "test_kv_offload_machine.py", "OffloadMachine")
#: Tests of the scheduler and the KV cache manager in random runs with a fake runner.
SCHEDULED: tuple[tuple[tuple[str, str], tuple[str, ...]], ...] = (
    *(
        (_SCHEDULER_MACHINE, (method, policy, "static batching", _RECOMPUTED))
        for method in (_NGRAM, _DRAFT_MODEL)
        for policy in ("priorities", "shortest job first")
    ),
    *(
        (_OFFLOAD_MACHINE, ("host tier", "disk tier", "pinned prefixes", mode))
        for mode in (_RECOMPUTED, _SWAPPED)
    ),
)


def pairs(entries: tuple[tuple[tuple[str, str], tuple[str, ...]], ...]) -> Iterator[frozenset[str]]:
    """All pairs that these entries cover."""
    for _, features in entries:
        yield from map(frozenset, combinations(features, 2))
