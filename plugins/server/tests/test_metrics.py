"""/metrics: what Prometheus is told is what happened."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

BODY = {"prompt": [1, *range(10, 50)], "max_tokens": 7, "ignore_eos": True, "temperature": 0}


def read(server: Any) -> dict[str, float]:
    """Every sample, its labels behind its name."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "le")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_tokens_and_requests_are_counted(serve: Callable[..., Any], tiny: Path) -> None:
    server = serve((tiny, "tiny"))
    for _ in range(2):
        assert server.post("/v1/completions", BODY).status_code == 200
    server.stream("/v1/completions", BODY)
    server.post("/v1/completions", {"prompt": []})
    told, model = read(server), "{model=tiny}"
    assert told[f"modelbay_prompt_tokens_total{model}"] == 3 * 41
    assert told[f"modelbay_generation_tokens_total{model}"] == 3 * 7
    assert told[f"modelbay_prefix_cache_query_tokens_total{model}"] == 3 * 41
    assert told[f"modelbay_prefix_cache_hit_tokens_total{model}"] == 2 * 32
    assert told["modelbay_sequences_finished_total{model=tiny,reason=length}"] == 3
    for name in ("time_to_first_token", "inter_token", "queue", "request"):
        assert told[f"modelbay_{name}_seconds_count{model}"] == 3, name
        assert told[f"modelbay_{name}_seconds_sum{model}"] > 0, name
    assert told[f"modelbay_step_seconds_count{model}"] >= 3 * 7
    assert told["modelbay_http_responses_total{route=/v1/completions,status=200}"] == 3
    assert told["modelbay_http_responses_total{route=/v1/completions,status=400}"] == 1
    assert told["modelbay_server_cpu_seconds"] > 0
    per_token = told["modelbay_server_cpu_seconds"] / told[f"modelbay_generation_tokens_total{model}"]
    # The two are read one after the other, and reading them costs time as well.
    assert told["modelbay_server_cpu_seconds_per_token"] == pytest.approx(per_token, rel=0.1)


def test_gauges_follow_what_runs(serve: Callable[..., Any], tiny: Path) -> None:
    server = serve((tiny, "tiny"))
    idle = read(server)
    assert idle["modelbay_kv_cache_usage_ratio{model=tiny}"] == 0
    assert idle["modelbay_kv_cache_blocks{model=tiny}"] == idle["modelbay_kv_cache_free_blocks{model=tiny}"] > 0
    assert idle["modelbay_requests_in_flight"] == 0
    seen: list[dict[str, float]] = []

    def step_and_look(llm: Any) -> None:
        """One step by hand, and the snapshot that the loop takes after its own."""
        llm.engine.step()
        server.loop._look()

    with server.paused(), ThreadPoolExecutor() as clients:
        answer = clients.submit(server.post, "/v1/completions", BODY)
        server.wait_for(lambda: server.state.limiter.in_flight == 1)
        server.loop._inbox.put(lambda: step_and_look(server.loop._llm))
        server.loop._inbox.put(lambda: seen.append(read(server)))
        server.resume()
        assert answer.result().status_code == 200
    [busy] = seen
    assert busy["modelbay_sequences_running{model=tiny}"] == 1
    assert busy["modelbay_sequences_waiting{model=tiny}"] == 0
    assert busy["modelbay_kv_cache_usage_ratio{model=tiny}"] > 0
    assert busy["modelbay_requests_in_flight"] == 1
    server.wait_until_idle()
    assert read(server)["modelbay_kv_cache_usage_ratio{model=tiny}"] == 0


def test_paths_that_clients_make_up_are_no_labels(server: Any) -> None:
    for number in range(5):
        server.get(f"/made/up/{number}")
    told = read(server)
    assert told["modelbay_http_responses_total{route=other,status=404}"] >= 5
    assert not [name for name in told if "made" in name]
