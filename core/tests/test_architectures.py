"""BEHAVIOUR A1, A2 and C3: from the names in a config to one architecture and a task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from modelbay.architectures import architectures, select_architecture, suffix_task
from modelbay.args import EngineArgs
from modelbay.errors import ArchitectureError, PluginConflictError, UsageError
from modelbay.registry import Owned, Plugins, Preference
from modelbay.specs import CONTRACT_VERSION, ArchSpec, AttentionKindSpec, Owner
from modelbay.trace import Trace

FOO = Owner("acme-foo", "1.0", "foo")
BAR = Owner("acme-bar", "2.0", "bar")


def arch(name: str, **kwargs: Any) -> ArchSpec:
    return ArchSpec(name=name, target="nowhere:Model", **kwargs)


def plugins(
    *archs: ArchSpec | tuple[ArchSpec, Owner], prefer: dict[str, str] | None = None, kinds: Any = ()
) -> Plugins:
    owned = [Owned(*entry) if isinstance(entry, tuple) else Owned(entry, FOO) for entry in archs]
    preferences = {name: Preference(dist, "argument") for name, dist in (prefer or {}).items()}
    return Plugins([], {"architectures": owned, "attention_kinds": [Owned(kind, FOO) for kind in kinds]}, preferences)


def config(*names: str, model_type: str = "foo", raw: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(
        sources={}, architectures=names, model_type=model_type, raw=raw or {}, text=SimpleNamespace()
    )


def select(cfg: Any, installed: Plugins, trace: Trace | None = None, **kwargs: Any) -> tuple[str, str, str | None]:
    args = EngineArgs.create("m", **kwargs)
    task, name, owned = select_architecture(cfg, installed, args, Trace() if trace is None else trace)
    return task, name, owned.value.name if owned else None


CAUSAL = arch("FooForCausalLM", model_types=("foo",))


def test_a1_the_registered_name_is_taken_with_its_owner_in_the_trace() -> None:
    trace = Trace()
    assert select(config("FooForCausalLM"), plugins(CAUSAL), trace) == ("generate", "FooForCausalLM", "FooForCausalLM")
    decision = trace.find("architecture")
    assert decision.answer == "FooForCausalLM"
    assert "acme-foo 1.0" in decision.source
    assert trace.find("task").answer == "generate"
    assert trace.find("conversion").answer == "none"


def test_a1_the_first_name_that_somebody_registers_wins() -> None:
    trace = Trace()
    chosen = select(config("FooV2ForCausalLM", "FooForCausalLM"), plugins(CAUSAL), trace)
    assert chosen == ("generate", "FooForCausalLM", "FooForCausalLM")
    assert [rejected.option for rejected in trace.find("architecture").rejected] == ["FooV2ForCausalLM"]


def test_a1_nobody_registers_it_is_left_to_the_backends() -> None:
    assert select(config("UnknownForCausalLM"), plugins(CAUSAL)) == ("generate", "UnknownForCausalLM", None)
    assert select(config("UnknownModel"), plugins(CAUSAL)) == ("embed", "UnknownModel", None)


@pytest.mark.parametrize(
    ("name", "kwargs", "task", "conversion"),
    [
        ("FooForCausalLM", {"runner": "pooling"}, "embed", "FooForCausalLM -> embed"),
        ("FooForCausalLM", {"convert": "classify"}, "classify", "FooForCausalLM -> classify"),
        ("FooForCausalLM", {"convert": "embed", "runner": "pooling"}, "embed", "FooForCausalLM -> embed"),
        ("FooForCausalLM", {"convert": "none"}, "generate", "none"),
        ("FooModel", {}, "embed", "FooForCausalLM -> embed"),
        ("FooModel", {"runner": "pooling"}, "embed", "FooForCausalLM -> embed"),
        ("FooForSequenceClassification", {}, "classify", "FooForCausalLM -> classify"),
        ("FooForSequenceClassification", {"convert": "embed"}, "embed", "FooForCausalLM -> embed"),
        ("FooForRewardModel", {}, "classify", "FooForCausalLM -> classify"),
    ],
)
def test_a1_suffix_conversion(name: str, kwargs: dict[str, str], task: str, conversion: str) -> None:
    """A base or CausalLM class serves embed and classify, and the trace says which conversion."""
    trace = Trace()
    assert select(config(name), plugins(CAUSAL), trace, **kwargs) == (task, name, "FooForCausalLM")
    assert trace.find("conversion").answer == conversion
    if name != "FooForCausalLM":
        assert trace.find("architecture").answer == f"{name}, served by FooForCausalLM"


def test_a1_a_base_class_serves_pooling_for_the_causal_name() -> None:
    base = plugins(arch("FooModel", tasks=("embed",)))
    assert select(config("FooForCausalLM"), base, runner="pooling") == ("embed", "FooForCausalLM", "FooModel")
    assert select(config("FooForCausalLM"), base) == ("generate", "FooForCausalLM", None)


@pytest.mark.parametrize("name", ["FooForConditionalGeneration", "FooLMHeadModel", "FooForTokenClassification", "Foo"])
def test_a1_another_head_that_generates_or_is_unknown_is_never_converted(name: str) -> None:
    assert select(config(name), plugins(CAUSAL))[2] is None


def test_a1_no_conversion_when_told_so() -> None:
    assert select(config("FooModel"), plugins(CAUSAL), convert="none")[2] is None
    with pytest.raises(ArchitectureError, match="FooForCausalLM serves generate, but pooling without a conversion"):
        select(config("FooForCausalLM"), plugins(CAUSAL), convert="none", runner="pooling")


def test_a1_what_an_architecture_was_written_for_needs_no_conversion() -> None:
    both = plugins(arch("FooForCausalLM", tasks=("generate", "embed")))
    trace = Trace()
    assert select(config("FooForCausalLM"), both, trace, runner="pooling")[0] == "embed"
    assert trace.find("conversion").answer == "none"


@pytest.mark.parametrize("name", ["FooModel", "FooForSequenceClassification"])
def test_a1_a_class_without_a_language_head_does_not_generate(name: str) -> None:
    with pytest.raises(ArchitectureError, match=f"{name} serves .*, but generate was asked for"):
        select(config(name), plugins(CAUSAL), runner="generate")


def test_a1_a_classifier_is_not_turned_into_an_embedder() -> None:
    classifier = plugins(arch("FooForSequenceClassification", tasks=("classify",)))
    with pytest.raises(ArchitectureError, match="serves classify, but embed was asked for"):
        select(config("FooForSequenceClassification"), classifier, convert="embed")


def test_contradicting_arguments_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="contradicts runner=generate"):
        select(config("FooForCausalLM"), plugins(CAUSAL), runner="generate", convert="embed")


@pytest.mark.parametrize(
    ("contract", "advice"),
    [
        ((CONTRACT_VERSION + 1, CONTRACT_VERSION + 2), "Upgrade modelbay, or install an older acme-foo"),
        ((CONTRACT_VERSION - 1, CONTRACT_VERSION - 1), "Upgrade acme-foo, or install an older modelbay"),
    ],
)
def test_the_contract_range_is_checked_in_both_directions(contract: tuple[int, int], advice: str) -> None:
    installed = plugins(arch("FooForCausalLM", contract=contract))
    with pytest.raises(ArchitectureError) as caught:
        select(config("FooForCausalLM"), installed)
    assert f"this Modelbay speaks version {CONTRACT_VERSION}" in str(caught.value)
    assert advice in str(caught.value)
    trace = Trace()
    assert select(config("FooForCausalLM"), installed, trace, model_impl="transformers")[2] is None
    assert "model contract" in trace.find("architecture").rejected[0].reason


def test_an_attention_kind_that_nobody_offers_is_refused() -> None:
    mla = arch("FooForCausalLM", attention=("full", "mla"))
    with pytest.raises(ArchitectureError, match="needs the attention kind 'mla', which no plugin offers"):
        select(config("FooForCausalLM"), plugins(mla))
    kind = AttentionKindSpec(name="mla", target="a:b", kv="LatentKV")
    assert select(config("FooForCausalLM"), plugins(mla, kinds=[kind]))[2] == "FooForCausalLM"


def test_two_owners_conflict_and_a_preference_is_traced() -> None:
    with pytest.raises(PluginConflictError, match=r"acme-bar 2\.0 .* and acme-foo 1\.0"):
        select(config("FooForCausalLM"), plugins(CAUSAL, (CAUSAL, BAR)))
    trace = Trace()
    select(config("FooForCausalLM"), plugins(CAUSAL, (CAUSAL, BAR), prefer={"FooForCausalLM": "acme-bar"}), trace)
    decision = trace.find("architecture")
    assert "acme-bar 2.0" in decision.source
    assert [(r.option, r.reason) for r in decision.rejected] == [
        ("FooForCausalLM of acme-foo 1.0", "acme-bar is preferred (argument)")
    ]


def test_a2_the_list_has_owners_and_the_keys_of_list_archs() -> None:
    listed = architectures(plugins((CAUSAL, BAR), arch("AForCausalLM", examples=("org/a",), parallel=("tp",))))
    assert [entry.name for entry in listed] == ["AForCausalLM", "FooForCausalLM"]
    assert isinstance(listed[0], ArchSpec)
    assert listed[1].owner == BAR
    assert listed[0].to_dict() == {
        "name": "AForCausalLM",
        "tasks": ["generate"],
        "modalities": ["text"],
        "owner": "acme-foo",
        "version": "1.0",
        "model_types": [],
        "parallel": ["tp"],
        "attention": ["full"],
        "examples": ["org/a"],
    }


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("LlamaForCausalLM", "generate"),
        ("GPT2LMHeadModel", "generate"),
        ("BertModel", "embed"),
        ("Qwen2ForRewardModel", "classify"),
        ("Gemma3ForConditionalGeneration", "generate"),
        ("BertForTokenClassification", None),
        ("Model", None),
    ],
)
def test_suffix_task(name: str, task: str | None) -> None:
    assert suffix_task(name) == task
