"""The prefix cache as clients and operators see it: usage, salt, metrics, the reset."""

from tests.server.conftest import ADMIN_KEY, KEY


def cached_tokens(server, text, **fields):
    body = {"model": "tiny", "prompt": text, "max_tokens": 12, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body, key=KEY).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_share_the_prefix_cache_only_with_equal_cache_salts(server):
    text = "A prompt that is long enough to fill some blocks of the cache. " * 3
    assert cached_tokens(server, text, cache_salt="alice") == 0
    assert cached_tokens(server, text, cache_salt="alice") > 0
    assert cached_tokens(server, text, cache_salt="bob") == 0
    assert cached_tokens(server, text) == 0


def test_prefix_cache_hits_and_kv_tiers_are_in_the_metrics(server):
    text = "A prompt whose beginning is cached, as the metrics are going to show. " * 3
    pinned = server.metric("llm_prefix_cache_pinned_blocks", model="tiny")
    for _ in range(2):
        cached_tokens(server, text)
    hits = server.metric("llm_prefix_cache_hit_tokens_total", model="tiny")
    assert hits == server.metric("vllm:prefix_cache_hits_total", engine="0", model_name="tiny")
    assert 0 < hits < server.metric("llm_prefix_cache_query_tokens_total", model="tiny")
    assert server.metric("llm_prefix_cache_pinned_blocks", model="tiny") == pinned
    for tier in ("host", "disk"):
        assert server.metric("llm_kv_tier_loaded_blocks_total", model="tiny", tier=tier) == 0


def test_the_answers_to_one_prompt_compute_it_once_and_say_what_was_cached_before_them(server):
    text = "A prompt with several answers, which is long enough to fill some blocks of the cache. " * 3
    hits = server.metric("llm_prefix_cache_hit_tokens_total", model="tiny")
    assert cached_tokens(server, text, n=3) == 0
    found = server.metric("llm_prefix_cache_hit_tokens_total", model="tiny") - hits
    assert found > 0 and found == 2 * cached_tokens(server, text, n=3)


def test_resetting_the_prefix_cache_needs_an_admin_s_key_and_drops_all_entries(server):
    text = "Another prompt that is long enough to fill some blocks of the cache. " * 3
    cached_tokens(server, text)
    assert cached_tokens(server, text) > 0
    assert server.post("/reset_prefix_cache", {}, key=KEY).status_code == 403
    assert cached_tokens(server, text) > 0
    assert server.post("/reset_prefix_cache", {}, key=ADMIN_KEY).status_code == 200
    assert cached_tokens(server, text) == 0
