"""One forward on meta, before any weight is loaded: who calls attention, how often, and with what.

Models accept another attention function and never call it, call it twice, or bring a mask of their own. So nothing
is believed: what the probe saw is what will be served, and everything it does not understand is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay_transformers.dispatch import attach

#: Tokens of the probe: not a size that any dimension of a model has.
TOKENS = 11

#: Arguments of the attention interface that change nothing here.
_WITHOUT_MEANING = {
    "dropout", "position_ids", "use_cache", "cache", "past_key_values", "cache_position", "position_embeddings",
    "output_attentions", "output_hidden_states", "return_dict", "training", "deterministic", "is_causal",
    "logits_to_keep", "num_items_in_batch", "attention_mask", "output_router_logits", "layer_idx",
}  # fmt: skip
#: Those that the runtime's attention applies.
_APPLIED = {"scaling", "sliding_window", "softcap", "s_aux"}


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """One attention module as the probe saw it."""

    name: str
    module: nn.Module
    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: bool
    causal: bool


@dataclass(slots=True)
class ProbeResult:
    """``attention`` in the order of the calls; ``linears``: name -> the identity of each call's input."""

    attention: list[AttentionFacts]
    hidden_size: int
    linears: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Call:
    q: torch.Size
    k: torch.Size
    v: torch.Size
    facts: dict[str, Any]


class _Recorder:
    """Stands where a layer will: writes the call down and gives zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, _Call]] = []

    def __call__(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
    ) -> torch.Tensor:
        if mask is not None:
            raise BackendError(
                f"{type(module).__name__} brings an attention mask of its own ({_shape(mask)}); "
                "what it hides is not known, so it is not served."
            )
        self.calls.append((module, _Call(q.shape, k.shape, v.shape, facts)))
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _shape(mask: Any) -> str:
    return f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__


def probe(base: nn.Module, *, layer_count: int | None = None) -> ProbeResult:
    """Run ``base`` (parameters on meta, buffers real) once and read off its attention.

    Raises:
        BackendError: naming the module and the rule it breaks.
    """
    recorder, linears = _Recorder(), _LinearWatch(base)
    for module in base.modules():
        attach(module, recorder)
    try:
        with linears, _experts_pass_through(base):
            hidden = run_on_meta(base)
    finally:
        for module in base.modules():
            attach(module, None)
    names = {module: name for name, module in base.named_modules()}
    attention = _read_calls(recorder.calls, names, base)
    if layer_count is not None and len(attention) < layer_count:
        raise BackendError(
            f"{type(base).__name__} has {layer_count} layers and {len(attention)} of them call attention through "
            "Transformers' interface: the others attend (or keep a state) in a way that is not served."
        )
    return ProbeResult(attention, hidden.shape[-1], linears.inputs)


def run_on_meta(base: nn.Module) -> torch.Tensor:
    """The last hidden state [1, TOKENS, H] on meta.

    Raises:
        BackendError: the forward needs what is not there (a cache, pixels, real values).
    """
    buffers = {name: buffer.to("meta") for name, buffer in base.named_buffers()}
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "position_ids": torch.zeros_like(ids), "use_cache": False, "return_dict": True}
    accepted = accepted_arguments(base)
    if "position_ids" not in accepted:
        raise BackendError(
            f"{type(base).__name__}.forward takes no position_ids: tokens of several sequences cannot share a batch."
        )
    try:
        with torch.no_grad(), _real_attributes_on_meta(base):
            output = torch.func.functional_call(base, buffers, (), {k: v for k, v in inputs.items() if k in accepted})
    except BackendError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise BackendError(
            f"{type(base).__name__} cannot be probed without weights: {type(error).__name__}: {text}"
        ) from error
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        hidden = output[0]
    if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != (1, TOKENS):
        raise BackendError(f"{type(base).__name__} does not give one hidden state for each token ({_shape(hidden)}).")
    return hidden


def accepted_arguments(module: nn.Module) -> set[str]:
    """Names of forward's arguments; a ``**kwargs`` counts for those that Transformers' models pass along."""
    parameters = inspect.signature(module.forward).parameters
    return set(parameters) | ({"use_cache", "return_dict"} if "kwargs" in parameters else set())


@contextmanager
def _real_attributes_on_meta(base: nn.Module) -> Iterator[None]:
    """Tensors that modules keep as plain attributes (``original_inv_freq``) are on meta for the time of the probe."""
    moved: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module in base.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                moved.append((module, name, value))
                module.__dict__[name] = value.to("meta")
    try:
        yield
    finally:
        for module, name, value in moved:
            module.__dict__[name] = value


@contextmanager
def _experts_pass_through(base: nn.Module) -> Iterator[None]:
    """Experts route by value, and on meta there are none: for the probe they hand their input on."""
    replaced = []
    for module in base.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module):
            replaced.append(experts)
            experts.__dict__["forward"] = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for experts in replaced:
            experts.__dict__.pop("forward", None)


class _LinearWatch:
    """Which linears are called through their forward, and which are given the very same tensor."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.inputs: dict[str, list[int]] = {}
        self._kept: list[torch.Tensor] = []  # an id is only an identity while its object lives
        self._hooks: list[Any] = []

    def __enter__(self) -> _LinearWatch:
        for name, module in self.base.named_modules():
            if type(module) is nn.Linear:
                self._hooks.append(module.register_forward_pre_hook(self._record(name)))
        return self

    def _record(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                self._kept.append(args[0])
                self.inputs.setdefault(name, []).append(id(args[0]))

        return hook

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()


def _read_calls(
    calls: list[tuple[nn.Module, _Call]], names: Mapping[nn.Module, str], base: nn.Module
) -> list[AttentionFacts]:
    if not calls:
        raise BackendError(
            f"{type(base).__name__} never calls attention through Transformers' interface (ALL_ATTENTION_FUNCTIONS), "
            "so the runtime's attention and cache cannot serve it."
        )
    found: list[AttentionFacts] = []
    seen: dict[int, str] = {}
    called: set[nn.Module] = set()
    for order, (module, call) in enumerate(calls):
        name = names[module]
        if module in called:
            raise BackendError(f"{name} calls attention more than once in one forward; each module may call it once.")
        called.add(module)
        facts = _read_call(name, module, call, order)
        if facts.causal and facts.layer in seen:
            raise BackendError(
                f"{name} and {seen[facts.layer]} have the same layer_idx {facts.layer}: it must tell their caches apart."
            )
        seen[facts.layer] = name
        found.append(facts)
    if len({facts.causal for facts in found}) > 1:
        raise BackendError(f"{type(base).__name__} has causal and bidirectional layers in one model.")
    return found


def _read_call(name: str, module: nn.Module, call: _Call, order: int) -> AttentionFacts:
    given = {key: value for key, value in call.facts.items() if value is not None}
    unknown = sorted(key for key in given if key not in _APPLIED and key not in _WITHOUT_MEANING)
    unknown = [key for key in unknown if not _is_off(given[key])]
    if unknown:
        raise BackendError(f"{name} gives its attention {', '.join(unknown)}, which is not known here.")
    causal = given.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    layer = getattr(module, "layer_idx", None)
    if not causal:
        layer = order
    elif not isinstance(layer, int) or isinstance(layer, bool):
        raise BackendError(f"{name} has no integer layer_idx ({layer!r}): it must tell its cache from others'.")
    (_, heads, length, size), (_, kv_heads, keys, k_size), v_size = call.q, call.k, call.v[-1]
    if length != TOKENS or keys != TOKENS or size != k_size:
        raise BackendError(f"{name} attends {length} queries of size {size} over {keys} keys of size {k_size}.")
    if heads % kv_heads:
        raise BackendError(f"{name} has {heads} query heads over {kv_heads} key heads, which do not divide.")
    scaling = given.get("scaling")
    return AttentionFacts(
        name, module, layer, heads, kv_heads, size, v_size, size**-0.5 if scaling is None else _number(scaling, name),
        _window(given.get("sliding_window"), name), _optional(given.get("softcap"), name), "s_aux" in given, bool(causal),
    )  # fmt: skip


def _is_off(value: Any) -> bool:
    return isinstance(value, bool) and not value


def _number(value: Any, name: str) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    raise BackendError(f"{name} gives its attention a scaling that is no plain number ({type(value).__name__}).")


def _optional(value: Any, name: str) -> float | None:
    return None if value is None else _number(value, name)


def _window(value: Any, name: str) -> int | None:
    if value is None or value is False:
        return None
    if isinstance(value, int) and value > 0:
        return value
    raise BackendError(f"{name} gives its attention sliding_window={value!r}, which is no number of tokens.")
