"""Four custom models that keep the rules, against their own code run by Transformers in float32 (A3, X1-X8)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM, SamplingParams, resolve
from modelbay.errors import ArchitectureError, BackendError
from modelbay_testing.recording import record_logits
from modelbay_testing.tiny import tiny_checkpoint

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DECODERS = ["lumen", "hive", "grove"]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 64}, {"enable_chunked_prefill": False, "enable_prefix_caching": False}],
    ids=["chunked", "whole"],
)
def test_x1_logits_are_those_of_the_repositorys_own_code(
    name: str,
    options: dict[str, Any],
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Any],
    open_llm: Callable[..., LLM],
    prompts: list[Any],
) -> None:
    """Mixed lengths in one batch, every prompt token and every decoded one through the cache."""
    llm = open_llm(checkpoint(name), **options)
    own = reference(name)
    with record_logits(llm) as recording:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert recording.positions(output.request_id) == list(range(output.metrics.num_cached_tokens, len(tokens) - 1))
        assert recording.worst_difference(output.request_id, own.logits(tokens)) <= TOLERANCE
    assert outputs[1].outputs[0].token_ids == own.greedy(outputs[1].prompt_token_ids, 12)


@pytest.mark.parametrize("name", DECODERS)
def test_a4_the_module_is_one_of_the_transformers_backend(
    name: str, checkpoint: Callable[[str], Path], open_llm: Callable[..., LLM]
) -> None:
    llm = open_llm(checkpoint(name))
    [kind] = llm.apply_model(lambda model: type(model).__name__)
    assert kind.startswith("Transformers")
    assert llm.resolution.backend == "auto_map"
    [own] = llm.apply_model(lambda model: type(model.base).__module__)
    assert own.startswith("modelbay.remote_code.h")


def test_every_tensor_is_accounted_for(checkpoint: Callable[[str], Path], open_llm: Callable[..., LLM]) -> None:
    for name in DECODERS:
        report = open_llm(checkpoint(name)).load_report
        assert {use.status for use in report.tensors.values()} == {"loaded"}
        assert {use.status for use in report.parameters.values()} <= {"loaded", "tied"}


def test_a1_model_impl_transformers_reaches_custom_models_and_native_does_not(
    checkpoint: Callable[[str], Path],
) -> None:
    model = str(checkpoint("lumen"))
    for wanted in ("auto", "transformers", "auto_map"):
        resolution = resolve(model, model_impl=wanted, trust_remote_code=True)
        assert resolution.backend == "auto_map"
        backend = resolution.trace.find("backend", "backends")
        assert backend is not None
        assert {rejected.option for rejected in backend.rejected} == {"native", "transformers"}
    with pytest.raises(ArchitectureError, match="model_impl=native cannot build 'LumenForCausalLM'"):
        resolve(model, model_impl="native", trust_remote_code=True)


def test_auto_map_does_not_go_before_transformers_own_classes(tmp_path: Path) -> None:
    """C2 for models: a type that Transformers has runs Transformers' code, the repository's only if asked for."""
    folder = tiny_checkpoint(tmp_path / "llama", "gpt_neox")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    resolution = resolve(str(folder), trust_remote_code=True)
    assert resolution.backend == "transformers"
    assert resolve(str(folder), trust_remote_code=True, model_impl="auto_map").backend == "auto_map"


def test_c2_a_version_4_config_class_reads_its_own_keys(
    make_checkpoint: Callable[..., Path], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    """It gets the dict as it stands on disk; what it makes of rope_scaling changes the model."""
    plain = make_checkpoint("grove", "plain", {"rope_scaling": None})
    llm = open_llm(plain)
    assert llm.resolution.config.hf.stretch == 1.0
    stretched = open_llm(plain, hf_overrides={"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert stretched.resolution.config.hf.stretch == 2.0
    assert stretched.resolution.config.hf.theta == 500.0
    with record_logits(llm) as a, record_logits(stretched) as b:
        first, second = (engine.generate(prompts[3], GREEDY, use_tqdm=False)[0] for engine in (llm, stretched))
    rows = [r.rows[o.request_id, 0][40][0] for r, o in ((a, first), (b, second))]
    assert (rows[0] - rows[1]).abs().max() > 100 * TOLERANCE


def test_two_models_and_two_loads_in_one_process_share_nothing(
    checkpoint: Callable[[str], Path], open_llm: Callable[..., LLM], prompts: list[Any], reference: Callable[[str], Any]
) -> None:
    first, second = open_llm(checkpoint("lumen")), open_llm(checkpoint("lumen"))
    other = open_llm(checkpoint("grove"))
    expected = reference("lumen").greedy(prompts[2]["prompt_token_ids"], 12)
    for llm in (first, second, first):
        other.generate(prompts[1], GREEDY, use_tqdm=False)
        assert llm.generate(prompts[2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    bases = [llm.apply_model(lambda model: model.base)[0] for llm in (first, second)]
    assert type(bases[0]) is type(bases[1])
    assert bases[0].config is not bases[1].config


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_bfloat16_runs_and_stays_close(
    dtype: str, checkpoint: Callable[[str], Path], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    llm = open_llm(checkpoint("lumen"), dtype=dtype)
    assert llm.apply_model(lambda model: {p.dtype for p in model.parameters()}) == [{torch.bfloat16}]
    assert all(output.finished for output in llm.generate(prompts, GREEDY, use_tqdm=False))


def test_explain_shows_the_probe_and_the_plans(checkpoint: Callable[[str], Path]) -> None:
    from modelbay_runtime.build import build_model

    resolution = resolve(str(checkpoint("lumen")), trust_remote_code=True)
    build_model(resolution)
    decided = {decision.question: decision for decision in resolution.trace}
    assert decided["model class"].answer == "TransformersForCausalLM"
    assert decided["attention"].answer == "3 layers: 4/2 heads of 16, causal, scaling 0.2"
    assert decided["base_model_tp_plan"].answer == "8 patterns"
    assert decided["base_model_pp_plan"].answer == "embed_tokens, layers, norm"


def test_x4_an_encoder_gives_the_hidden_states_of_its_own_code(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Any], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    llm, own = open_llm(checkpoint("quill")), reference("quill")
    assert llm.resolution.task == "embed"
    assert llm.apply_model(lambda model: type(model).__name__) == ["TransformersModel"]
    for output in llm.encode(prompts, use_tqdm=False):
        assert (output.hidden_states - own.hidden(output.prompt_token_ids)).abs().max() <= TOLERANCE


def test_x4_an_encoder_looks_both_ways_and_keeps_nothing(
    checkpoint: Callable[[str], Path], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    """Case 36: changing the last token changes the first token's state."""
    llm = open_llm(checkpoint("quill"))
    assert {type(spec).__name__ for spec in llm.apply_model(lambda model: model.kv_specs())[0].values()} == {"NoKV"}
    ids = prompts[2]["prompt_token_ids"]
    first, second = llm.encode([{"prompt_token_ids": ids}, {"prompt_token_ids": [*ids[:-1], 7]}], use_tqdm=False)
    assert (first.hidden_states[0] - second.hidden_states[0]).abs().max() > 1e-2


def test_x4_an_encoder_cannot_generate(checkpoint: Callable[[str], Path], open_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ArchitectureError, match="QuillModel serves embed, but generate was asked for"):
        open_llm(checkpoint("quill"), runner="generate")
    overridden = {"architectures": ["QuillForCausalLM"]}
    with pytest.raises(BackendError, match=r"attends both ways \(is_causal = False\), so it cannot generate"):
        open_llm(checkpoint("quill"), hf_overrides=overridden)


@pytest.mark.parametrize("name", DECODERS)
def test_a1_a_decoder_can_be_asked_for_its_hidden_states(
    name: str,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Any],
    open_llm: Callable[..., LLM],
    prompts: list[Any],
) -> None:
    own = reference(name)
    for runner in ("auto", "pooling"):
        llm = open_llm(checkpoint(name), runner=runner)
        for output in llm.encode(prompts, use_tqdm=False):
            assert (output.hidden_states - own.hidden(output.prompt_token_ids)).abs().max() <= TOLERANCE


PACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")
ONE_BY_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def unpack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Packed experts one by one, as most checkpoints have them."""
    result = {}
    for name, tensor in tensors.items():
        match = PACKED.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if match[2] == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, value in parts.items():
                result[f"{match[1]}.{index}.{part}.weight"] = value.contiguous()
    return result


def pack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one packed, as Transformers saves them."""
    result, found = {}, {}
    for name, tensor in tensors.items():
        match = ONE_BY_ONE.fullmatch(name)
        if match is None:
            result[name] = tensor
        else:
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for path, parts in found.items():
        count = 1 + max(index for index, _ in parts)
        gate_up = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        result[f"{path}.gate_up_proj"] = torch.stack(gate_up)
        result[f"{path}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])
    return result


@pytest.mark.parametrize(("name", "disk", "change"), [("hive", "packed", pack), ("grove", "one by one", unpack)])
def test_x7_experts_may_lie_on_disk_as_the_other_layout_has_them(
    name: str,
    disk: str,
    change: Callable[..., Any],
    make_checkpoint: Callable[..., Path],
    reference: Callable[[str], Any],
    open_llm: Callable[..., LLM],
    prompts: list[Any],
) -> None:
    """With the two in the layout of their own module: both disk layouts times both module layouts, one output."""
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(name)
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors)
    assert changed.keys() != tensors.keys()
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    llm = open_llm(folder)
    for output in llm.encode(prompts, use_tqdm=False):
        expected = reference(name).hidden(output.prompt_token_ids)
        assert (output.hidden_states - expected).abs().max() <= TOLERANCE
    assert {use.status for use in llm.load_report.tensors.values()} == {"loaded"}


@pytest.mark.parametrize(
    ("name", "architecture", "task"),
    [("lumen", "LumenForCausalLM", "generate"), ("quill", "QuillModel", "embed")],
)
def test_c3_architectures_may_be_left_out(name: str, architecture: str, task: str, code: Callable[..., Path]) -> None:
    """The seeds ask for auto_map.AutoModel in config.json and for nothing else."""
    resolution = resolve(str(code(name, config={"architectures": None})), trust_remote_code=True)
    assert (resolution.architecture, resolution.task) == (architecture, task)
    assert resolution.config.sources["architectures"].startswith("derived: auto_map")
