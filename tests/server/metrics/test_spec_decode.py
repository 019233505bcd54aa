"""Acceptance is on /metrics, under our names and vLLM's."""

from prometheus_client.parser import text_string_to_metric_families

from quire_server.core.stats import EngineStats, SpeculationStats
from quire_server.metrics.requests import Metrics


def test_what_the_engine_reports_of_drafts_is_on_the_page() -> None:
    metrics = Metrics("m")
    stats = SpeculationStats(10, 40, 25, (9, 8, 5, 3), 2)
    metrics.step(EngineStats(speculation=stats))
    samples = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(metrics.exposition("")[0].decode())
        for sample in family.samples
    }
    for name, value in (("drafts", 10), ("draft_tokens", 40), ("accepted_tokens", 25)):
        assert samples[f"llm_spec_decode_{name}_total", None] == value
        assert samples[f"vllm:spec_decode_num_{name}_total", None] == value
    for position, value in enumerate((9, 8, 5, 3)):
        for name in (
            "llm_spec_decode_accepted_tokens_per_pos",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
        ):
            assert samples[f"{name}_total", str(position)] == value
    assert samples["llm_spec_decode_pauses_total", None] == 2
