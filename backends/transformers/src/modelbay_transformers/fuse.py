"""Replace whole decoder layers by the runtime's block, where a trial proves that they compute the same.

A layer is a candidate if its parameters are those of the standard pre-norm decoder layer (norm, q/k/v/o, norm,
gate/up/down) and nothing else. Names prove nothing, so each kind of layer is tried: the layer itself, in Transformers'
code, and the runtime's block get the same random parameters and inputs in float32, and must give the same output. A
layer that multiplies a residual, norms elsewhere, turns halves differently or skips its rotation fails, and is left
alone. In the block q/k/v and gate/up are one product each, the residual is added by the product before it, and norm,
rotation and activation are the runtime's kernels.

Legend: T tokens, H hidden size, R rotary dimensions.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelbay.errors import ModelbayError, one_line_with_type
from modelbay.plugins import Plugins
from modelbay.trace import Rejected, Trace
from modelbay_runtime.api import BuildContext, Step
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.kv_layout import plan_layout
from modelbay_runtime.kernels.attention import AttentionSpec
from modelbay_runtime.kernels.table import REFERENCE, KernelTable
from modelbay_runtime.layers.attention import Attention, SelfAttention
from modelbay_runtime.layers.decoder import DecoderLayer
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.step import KVGroupStep
from modelbay_transformers import dispatch
from modelbay_transformers.attention import ServedAttention, StepHolder
from modelbay_transformers.probe import AttentionFacts

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_WEIGHTS = {
    "input_layernorm.weight", "post_attention_layernorm.weight",
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
}  # fmt: skip
_QKV_BIAS = {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}
_O_BIAS = {"self_attn.o_proj.bias"}
_MLP_BIAS = {"mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"}

#: Tokens of a trial, and the largest difference relative to the largest value that float32 accounts for.
_TOKENS = 7
_TOLERANCE = 1e-4
#: Every other token is small, as embeddings are: beside a mean square of 1 another epsilon of a norm is not seen.
_SMALL = 0.01
#: A trial holds two copies of a layer in float32; beyond this many parameters it would cost more than it is worth.
_LARGEST = 400_000_000


@dataclass(slots=True)
class Fusion:
    """``layers``: module name -> the block that stands for it. ``reasons``: why others were left alone -> how many."""

    layers: dict[str, FusedLayer] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)


class FusedLayer(DecoderLayer):
    """The runtime's decoder layer, called as Transformers calls its own. Parameters keep their names."""

    self_attn: SelfAttention

    def __init__(self, build: BuildContext, facts: AttentionFacts, names: set[str], holder: StepHolder) -> None:
        self._biases = (names >= _QKV_BIAS, names >= _O_BIAS)
        super().__init__(build, facts.layer)
        self._holder = holder

    @property
    def attention(self) -> Attention:
        """The paged attention inside."""
        return self.self_attn.attention

    def make_attention(self, build: BuildContext, layer: int) -> SelfAttention:
        qkv_bias, o_bias = self._biases
        return SelfAttention(build, layer, qkv_bias=qkv_bias, o_bias=o_bias)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """hidden_states: [1, T, H]; position_embeddings: cos and sin, [1, T, R] each -> [1, T, H]."""
        step = self._holder.current
        assert step is not None, "the model's forward sets the step before any layer runs"
        cos, sin, _ = step.cached(("rotary", id(position_embeddings[0])), lambda: _rotary_form(position_embeddings))
        return super().forward(hidden_states[0], cos, sin, step)[None]


def _rotary_form(position_embeddings: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """cos and signed sin [T, 1, R] as the runtime's kernel takes them, once per step for all layers. The tensors they
    come from are kept, so that their identity stays theirs."""
    cos, sin = position_embeddings
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    return cos[0].unsqueeze(1), signed.unsqueeze(1), position_embeddings


def fuse_layers(
    build: BuildContext, plugins: Plugins, base: nn.Module, attention: list[AttentionFacts], holder: StepHolder
) -> Fusion:
    """Replace what can be replaced in ``base``; nothing is raised for what cannot."""
    fusion = Fusion()
    verdicts: dict[Any, str | None] = {}
    for facts in attention:
        name = facts.name.rpartition(".")[0]
        layer = base.get_submodule(name)
        reason = _not_standard(layer, facts)
        if reason is None:
            key = (type(layer), _fingerprint(layer), _shared_facts(facts))
            if key not in verdicts:
                verdicts[key] = _try(build, plugins, base, layer, facts)
            reason = verdicts[key]
        if reason is not None:
            fusion.reasons[reason] = fusion.reasons.get(reason, 0) + 1
            continue
        fusion.layers[name] = FusedLayer(build, facts, _parameter_names(layer), holder)
    for name, block in fusion.layers.items():
        base.set_submodule(name, block)
    return fusion


def _parameter_names(layer: nn.Module) -> set[str]:
    return {name for name, _ in layer.named_parameters()}


def _not_standard(layer: nn.Module, facts: AttentionFacts) -> str | None:
    names = _parameter_names(layer)
    if set(layer._modules) != _CHILDREN or not names >= _WEIGHTS:
        return "its parts are not those of the standard decoder layer"
    rest = names - _WEIGHTS
    for group in (_QKV_BIAS, _O_BIAS, _MLP_BIAS):
        if rest >= group:
            rest -= group
    if rest:
        return f"it has further parameters ({', '.join(sorted(rest)[:3])})"
    if any(True for _ in layer.named_buffers()):
        return "it has buffers"
    if not facts.causal or facts.sinks or facts.softcap:
        return "its attention is not plain causal attention"
    if sum(parameter.numel() for parameter in layer.parameters()) > _LARGEST:
        return "it is too large to be tried"
    return None


def _fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Everything plain that a layer's modules know, but their index: layers that differ in nothing share a trial."""
    found = []
    for name, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if key == "layer_idx" or key.startswith("_") or key == "config":
                continue
            plain = isinstance(value, (int, float, str, bool, tuple, list, dict, type(None)))
            found.append((name, key, repr(value) if plain else id(value) if callable(value) else type(value)))
    return tuple(found)


def _shared_facts(facts: AttentionFacts) -> tuple[Any, ...]:
    apart = {"name", "module", "layer"}
    return tuple(getattr(facts, entry.name) for entry in dataclasses.fields(facts) if entry.name not in apart)


def _try(build: BuildContext, plugins: Plugins, base: nn.Module, layer: nn.Module, facts: AttentionFacts) -> str | None:
    """Run layer and block on the same numbers; None if they agree, else the reason."""
    cpu = torch.device("cpu")
    table = KernelTable(plugins, cpu, torch.float32, kernels=REFERENCE)
    trial = dataclasses.replace(build, dtype=torch.float32, device=cpu, kernels=table, parallel=ParallelContext())
    holder = StepHolder()
    try:
        block = FusedLayer(trial, facts, _parameter_names(layer), holder)
        if block.attention.spec != _expected_spec(facts):
            return "its heads, scaling or window are not those of the config"
        original = copy.deepcopy(layer)
        _fill_alike(original, block)
        dispatch.attach(original.get_submodule(facts.name.rpartition(".")[2]), ServedAttention(trial, facts, holder))
        with torch.no_grad():
            return _compare(base, original, block, holder, facts)
    except ModelbayError as error:
        return str(error)
    except Exception as error:
        return f"it could not be tried alone ({one_line_with_type(error)[:140]})"


def _expected_spec(facts: AttentionFacts) -> AttentionSpec:
    return AttentionSpec(
        facts.num_heads, facts.num_kv_heads, facts.head_size, facts.v_head_size, facts.scaling, facts.window
    )


def _fill_alike(original: nn.Module, block: nn.Module) -> None:
    """The same random parameters in both: in the block, q/k/v and gate/up are sections of packed ones."""
    generator = torch.Generator().manual_seed(0)
    values: dict[str, torch.Tensor] = {}
    for name, parameter in list(original.named_parameters()):
        scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        value = torch.randn(parameter.shape, generator=generator) * scale + (1.0 if "norm" in name else 0.0)
        values[name] = value
        _assign(original, name, value)
    for path, module in block.named_modules():
        for key in list(module._parameters):
            if module._parameters[key] is None:
                continue
            parent = path.rpartition(".")[0]
            packed = getattr(module, "packed", None)
            names = [f"{parent}.{section.name}.{key}" for section in packed] if packed else [f"{path}.{key}"]
            _assign(block, f"{path}.{key}", torch.cat([values[name] for name in names]))


def _assign(module: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, key = name.rpartition(".")
    module.get_submodule(path)._parameters[key] = nn.Parameter(value, requires_grad=False)


def _compare(
    base: nn.Module, original: nn.Module, block: FusedLayer, holder: StepHolder, facts: AttentionFacts
) -> str | None:
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        return "the model has no rotary_emb of its own, from which a trial could take positions"
    hidden_size = block.input_layernorm.weight.shape[0]
    hidden = torch.randn(1, _TOKENS, hidden_size, generator=torch.Generator().manual_seed(1))
    hidden[:, ::2] *= _SMALL
    positions = (torch.arange(_TOKENS) * 5)[None]
    turned = copy.deepcopy(rotary)(hidden, positions)
    inputs = {"position_embeddings": turned, "position_ids": positions, "attention_mask": None, "use_cache": False}
    holder.current = _step(block, facts)
    expected = original(hidden.clone(), **inputs)
    if not isinstance(expected, torch.Tensor):
        return "it returns more than its hidden states"
    holder.current = _step(block, facts)
    found = block(hidden.clone(), **inputs)
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if not difference <= _TOLERANCE:
        return f"the runtime's block gives something else (relative difference {difference:.2g})"
    return None


def _step(block: FusedLayer, facts: AttentionFacts) -> Step:
    """One sequence of `_TOKENS` tokens, prefilled at once, with a cache of its own."""
    layout = plan_layout({facts.layer: block.attention.kv_spec}, 16)
    cache = KVCache(layout, 2, torch.float32, torch.device("cpu"))
    group = KVGroupStep(
        slots=torch.arange(16, 16 + _TOKENS), block_tables=torch.ones(1, 1, dtype=torch.int32),
        first_position=torch.zeros(1, dtype=torch.int32), block_size=16,
    )  # fmt: skip
    return Step(
        positions=torch.arange(_TOKENS), query_start=torch.tensor([0, _TOKENS], dtype=torch.int32),
        seq_lens=torch.tensor([_TOKENS], dtype=torch.int32), query_lens=[_TOKENS], context_lens=[_TOKENS],
        num_decodes=0, caches=cache.views, groups={facts.layer: group},
    )  # fmt: skip


def say_fusion(trace: Trace, fusion: Fusion) -> None:
    """One decision: how many layers run as the runtime's block, and why the others do not."""
    rejected = tuple(Rejected(f"{count} layers", reason) for reason, count in fusion.reasons.items())
    trace.decide("build", "fused layers", len(fusion.layers), "trial: both on the same numbers", rejected=rejected)
