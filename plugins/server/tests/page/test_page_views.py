"""Trace, metrics, plugins and architectures on the page, beside what the server's routes and commands say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from modelbay.architectures import architectures, architectures_of_backends
from modelbay.plugins import load_plugins

ENTER = "\ue007"


def rows(browser: Any, table: str) -> list[list[str]]:
    code = (
        "return [...document.querySelectorAll(`${arguments[0]} tbody tr:not(.group)`)]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    found: list[list[str]] = browser.js(code, table)
    return found


def test_the_trace_is_a_table_by_stage_with_what_was_rejected(browser: Any, page_server: Any) -> None:
    explained = page_server.get("/v1/modelbay/explain").json()
    trace = explained["trace"]
    assert any(decision["rejected"] for decision in trace)
    browser.open_ready(page_server, "#trace")
    browser.wait(lambda: rows(browser, "#trace"))
    stages = browser.js("return [...document.querySelectorAll('#trace tr.group')].map((row) => row.textContent)")
    assert stages == list(dict.fromkeys(decision["stage"] for decision in trace))
    shown = rows(browser, "#trace")
    assert len(shown) == len(trace)
    ordered = [decision for stage in stages for decision in trace if decision["stage"] == stage]
    for row, decision in zip(shown, ordered, strict=True):
        assert row[0].removeprefix("warning ") == decision["question"]
        assert row[0].startswith("warning ") == (decision["level"] == "warning")
        assert row[2] == decision["source"]
        for rejected in decision["rejected"]:
            assert rejected["option"] in row[3]
            assert rejected["reason"] in row[3]
    summary = browser.text("#summary")
    for name in ("architecture", "backend", "owner", "task"):
        assert explained["resolution"][name] in summary
    browser.set("trace-filter", "rope")
    browser.wait(lambda: 0 < len(rows(browser, "#trace")) < len(trace))
    assert all("rope" in " ".join(row).lower() for row in rows(browser, "#trace"))
    browser.set("trace-filter", "no such decision")
    browser.wait(lambda: not rows(browser, "#trace"))
    assert browser.text("#trace-count").startswith("0 of")


def test_another_model_has_another_trace(browser: Any, serve: Callable[..., Any], tiny: Path, checkpoint: Any) -> None:
    server = serve((tiny, "first"), (checkpoint("qwen2"), "second"))
    browser.open_ready(server, "#trace")
    browser.wait(lambda: "LlamaForCausalLM" in browser.text("#summary"))
    browser.one("#model").send_keys("second")
    browser.wait(lambda: "Qwen2ForCausalLM" in browser.text("#summary"))
    assert "loads when it is first asked for" in browser.text("#summary")


def test_plugins_and_architectures_are_those_that_the_commands_list(browser: Any, page_server: Any) -> None:
    plugins = load_plugins()
    native, others = architectures(plugins), architectures_of_backends(plugins)
    assert native
    assert others
    told = page_server.get("/v1/modelbay/architectures").json()["architectures"]
    assert [arch["name"] for arch in told] == [arch.name for arch in [*native, *others]]
    assert [arch["backend_only"] for arch in told] == [False] * len(native) + [True] * len(others)
    assert page_server.get("/v1/modelbay/plugins").json() == {
        "plugins": [record.to_dict() for record in plugins.records]
    }
    browser.open_ready(page_server, "#plugins")
    browser.wait(lambda: rows(browser, "#architectures"))
    found = {row[0]: row for row in rows(browser, "#plugins")}
    for record in plugins.records:
        row = found[record.name]
        assert row[1] == f"{record.distribution} {record.version}"
        assert row[2] == record.status
        for hook in record.hooks:
            assert hook.removeprefix("register_").replace("_", " ") in row[3]
    assert [row[0] for row in rows(browser, "#architectures")] == [arch["name"] for arch in told]
    browser.one("#architectures-all").click()
    browser.wait(lambda: len(rows(browser, "#architectures")) == len(native))
    browser.set("architectures-filter", "deepseek_v3")
    browser.wait(lambda: [row[0] for row in rows(browser, "#architectures")] == ["DeepseekV3ForCausalLM"])


def plot(browser: Any, title: str) -> dict[str, str]:
    """One plot as it is shown, said and drawn."""
    code = """
      const figure = [...document.querySelectorAll("figure")]
        .find((each) => each.querySelector("figcaption").textContent === arguments[0]);
      return {
        value: figure.querySelector(".value").textContent,
        said: figure.querySelector("svg").getAttribute("aria-label"),
        line: figure.querySelector(".line").getAttribute("d"),
      };
    """
    found: dict[str, str] = browser.js(code, title)
    return found


def test_plots_follow_what_runs(browser: Any, page_server: Any, pace: Callable[[Any], Any]) -> None:
    browser.open_ready(page_server)
    held = pace(page_server)
    browser.set("max-tokens", "400")
    browser.set("temperature", "0")
    browser.one("#prompt").send_keys("The quick brown fox", ENTER)
    held.steps(3)
    browser.go("metrics")
    browser.wait(lambda: plot(browser, "Running sequences")["value"] == "1", "one that runs")
    busy = plot(browser, "Running sequences")
    assert "now 1" in busy["said"]
    assert busy["line"]
    assert plot(browser, "KV cache in use")["value"] not in ("no data yet", "0.00 %")
    assert plot(browser, "Queued sequences")["value"] == "0"
    held.free()
    browser.wait(lambda: plot(browser, "Running sequences")["value"] == "0", "the end")
    after = plot(browser, "Running sequences")
    assert "highest 1" in after["said"]
    assert after["line"] != busy["line"]
    said = browser.wait(lambda: rate(plot(browser, "Tokens generated")["said"]), "tokens of the last seconds")
    assert said > 0
    browser.wait(lambda: plot(browser, "Time to first token")["value"].endswith("s"), "the first token's time")
    assert plot(browser, "Prompt tokens from the prefix cache")["value"].endswith("%")


def rate(said: str) -> float:
    """The highest rate that the plot's words name."""
    return float(said.rpartition("highest ")[2].removesuffix(" tokens/s")) if "highest" in said else 0.0


def test_metrics_are_read_as_prometheus_reads_them(browser: Any, page_server: Any) -> None:
    """Also labels with quotes, backslashes and ends of lines in them."""
    hostile = (
        '# HELP a text with "quotes"\n# TYPE a gauge\n'
        'a{model="x\\"y\\\\z\\nw",b="{}, c=\\"d\\""} 1.5e-3\na 2\n'
        'h_bucket{le="+Inf"} 4\nh_sum +Inf\nh_count NaN\n'
    )
    browser.open_ready(page_server)
    code = """
      const { parse } = await import("/prometheus.js");
      return args.map((text) => parse(text).map(({ name, labels, value }) => [name, labels, String(value)]));
    """
    real = page_server.get("/metrics").text
    found, found_hostile = browser.module(code, real, hostile)
    expected = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(real)
        for sample in family.samples
    ]
    assert [(name, labels) for name, labels, _ in found] == [(name, labels) for name, labels, _ in expected]
    assert [float(value) for *_, value in found] == [value for *_, value in expected]
    assert found_hostile[:2] == [["a", {"model": 'x"y\\z\nw', "b": '{}, c="d"'}, "0.0015"], ["a", {}, "2"]]
    assert [value for *_, value in found_hostile[2:]] == ["4", "Infinity", "NaN"]
