"""Before any weight is loaded: who calls attention, how often, and with what.

Models accept another attention function and never call it, call it twice, or bring a mask of their own. So nothing
is believed: what the probe saw is what will be served, and everything it does not understand is refused by name.

It runs the model twice. Once under a name for which Transformers builds masks, to read off which keys each layer sees;
once as it will be served, without any mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay_transformers import dispatch, masks
from modelbay_transformers.masks import MaskFacts
from modelbay_transformers.picking import let_see_everything
from modelbay_transformers.positions import PositionGiver, numbering_places, takes_positions
from modelbay_transformers.probe_run import (
    TOKENS,
    LinearWatch,
    NeedsValues,
    Seen,
    attention_named,
    name_attention,
    run_on_meta,
    shape_of,
)
from modelbay_transformers.spread import OwnNumbering

#: Arguments of the attention interface that change nothing here.
_WITHOUT_MEANING = {
    "dropout", "position_ids", "use_cache", "cache", "past_key_values", "cache_position", "position_embeddings",
    "output_attentions", "output_hidden_states", "return_dict", "training", "deterministic", "is_causal",
    "logits_to_keep", "num_items_in_batch", "attention_mask", "output_router_logits", "layer_idx",
}  # fmt: skip
#: Those that the runtime's attention applies.
_APPLIED = {"scaling", "sliding_window", "softcap", "s_aux", "indices"}
#: Masks are looked at up to this length.
LONGEST = 1 << 17


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
    """``attention`` in the order of the calls; ``linears``: name -> the identity of each call's input;
    ``position_rows``: rows of the smallest table that is indexed by position, None if there is none."""

    attention: list[AttentionFacts]
    hidden_size: int
    linears: dict[str, list[int]] = field(default_factory=dict)
    position_rows: int | None = None


@dataclass(slots=True)
class Call:
    """One call of attention: shapes, the origin of its mask, and its arguments."""

    module: nn.Module
    q: torch.Size
    k: torch.Size
    v: torch.Size
    mask: Any
    facts: dict[str, Any]


class _Recorder:
    """Stands where a layer will: writes the call down and gives zeros."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
    ) -> torch.Tensor:
        if mask is not None and masks.origin(mask) is None and facts.get("indices") is None:
            raise BackendError(
                f"{type(module).__name__} brings an attention mask of its own ({shape_of(mask)}); "
                "what it hides is not known, so it is not served."
            )
        self.calls.append(Call(module, q.shape, k.shape, v.shape, masks.origin(mask), facts))
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def probe(base: nn.Module, *, layer_count: int | None = None, longest: int = LONGEST) -> ProbeResult:
    """Run ``base`` (parameters on meta, buffers real) and read off its attention.

    Args:
        layer_count: how many layers must call attention at least.
        longest: the longest sequence that will be served, in tokens.

    Raises:
        BackendError: naming the module and the rule it breaks.
    """
    dispatch.register()
    if not takes_positions(base) and PositionGiver.find(base) is None:
        PositionGiver(base)
    masked, seen, _ = _run(base, dispatch.PROBING)
    let_see_everything(base, masked, seen, longest, lambda tokens: _run(base, dispatch.PROBING, tokens))
    calls, seen, linears = run_as_served(base)
    if not calls:
        raise BackendError(
            f"{type(base).__name__} never calls attention through Transformers' interface (ALL_ATTENTION_FUNCTIONS), "
            "so the runtime's attention and cache cannot serve it."
        )
    names = {module: name for name, module in base.named_modules()}
    _check_layers(base, calls, seen.ran, layer_count)
    if not seen.positions_used:
        raise BackendError(
            f"{type(base).__name__}.forward takes no position_ids, or does not use them: "
            "tokens of several sequences cannot share a batch."
        )
    _check_neighbours(base, seen, longest)
    if [call.module for call in masked] != [call.module for call in calls]:
        raise BackendError(f"{type(base).__name__} attends otherwise when it builds no mask, so it is not served.")
    described = _read_masks(masked, names, longest, lambda tokens: _run(base, dispatch.PROBING, tokens)[0])
    attention = _read_calls(calls, described, names, base)
    return ProbeResult(attention, seen.hidden.shape[-1], linears, seen.position_rows)


def _check_neighbours(base: nn.Module, seen: Seen, longest: int) -> None:
    """A model that looks at the longest position of the batch must do the same whatever that is (it may check it).

    Raises:
        BackendError: it computes something else for long sequences, for their neighbours too.
    """
    who = seen.spread.longest_read_by
    if who is None:
        return
    try:
        _, far, _ = _run(base, dispatch.ATTENTION, first=max(0, longest - TOKENS))
    except BackendError:
        return  # it refuses such positions: so it will when they come
    if far.spread.trace != seen.spread.trace:
        raise BackendError(
            f"{who} depends on the longest position of the whole batch: "
            "a request's output would depend on its neighbours."
        )


def run_as_served(base: nn.Module) -> _Run:
    """Without any mask; where the model cannot do without one, with one that nobody reads."""
    try:
        return _run(base, dispatch.ATTENTION)
    except BackendError:
        found = _run(base, dispatch.WITH_MASK)
        name_attention(base, dispatch.WITH_MASK)
        return found


def _check_layers(base: nn.Module, calls: Sequence[Call], ran: frozenset[nn.Module], layer_count: int | None) -> None:
    """Where some children of a list attend, all that run must: the others keep a state, or attend in a way that is not
    seen.

    Raises:
        BackendError: naming a layer that does not call attention.
    """
    called = {call.module for call in calls}
    in_lists = False
    for name, module in base.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        attending = [any(inner in called for inner in child.modules()) for child in module]
        in_lists |= any(attending)
        idle = [i for i, child in enumerate(module) if not attending[i] and child in ran]
        if any(attending) and idle:
            raise BackendError(
                f"{attending.count(True)} of {len(attending)} {name} call attention through Transformers' interface; "
                f"{name}.{idle[0]} ({type(module[idle[0]]).__name__}) does not: it keeps a state or attends in another "
                "way, which is not served."
            )
    if not in_lists and layer_count is not None and len(calls) < layer_count:
        raise BackendError(
            f"{type(base).__name__} has {layer_count} layers by its config, and attention is called {len(calls)} "
            "times through Transformers' interface: the others keep a state or attend in another way, not served here."
        )


_Run = tuple[list[Call], Seen, dict[str, list[int]]]


def _run(base: nn.Module, name: str, tokens: int = TOKENS, *, first: int = 0) -> _Run:
    """Run with attention of this name, again with what the model turns out to need."""
    values = False
    while True:
        try:
            return _run_once(base, name, tokens, values, first)
        except OwnNumbering as found:
            if found.place in numbering_places(base):
                raise BackendError(
                    f"{type(base).__name__} numbers its tokens itself, in a way that is not served."
                ) from found
            numbering_places(base).add(found.place)
        except NeedsValues as error:
            if values:
                raise BackendError(
                    f"{type(base).__name__} decides by the values of its hidden states what to compute, "
                    "so it cannot be probed without weights."
                ) from error
            values = True


def _run_once(base: nn.Module, name: str, tokens: int, values: bool, first: int) -> _Run:
    recorder, linears = _Recorder(), LinearWatch(base)
    with dispatch.attending(base, recorder), linears, attention_named(base, name):
        seen = run_on_meta(base, tokens, values=values, first=first)
    return recorder.calls, seen, linears.inputs


def _read_masks(
    calls: Sequence[Call], names: Mapping[nn.Module, str], longest: int, run: Callable[[int], Sequence[Call]]
) -> list[MaskFacts | None]:
    """What each call's mask lets it see; None where a model gives its attention none.

    Args:
        run: the calls of a run over so many tokens, for masks that look at the tokens themselves.
    """
    length = max(TOKENS, min(longest, LONGEST))
    try:
        return _read_masks_of(calls, names, length)
    except IndexError:
        return _read_masks_of(run(length), names, length)


def _read_masks_of(calls: Sequence[Call], names: Mapping[nn.Module, str], length: int) -> list[MaskFacts | None]:
    known: dict[int, MaskFacts] = {}
    found: list[MaskFacts | None] = []
    for call in calls:
        if call.mask is not None and id(call.mask) not in known:
            known[id(call.mask)] = masks.read_mask(call.mask, length, names[call.module])
        found.append(None if call.mask is None else known[id(call.mask)])
    return found


def _read_calls(
    calls: Sequence[Call], described: Sequence[MaskFacts | None], names: Mapping[nn.Module, str], base: nn.Module
) -> list[AttentionFacts]:
    found: list[AttentionFacts] = []
    layers: dict[int, str] = {}
    by_module: dict[nn.Module, AttentionFacts] = {}
    for order, (call, mask) in enumerate(zip(calls, described, strict=True)):
        name = names[call.module]
        facts = _read_call(name, call, mask, order)
        again = by_module.get(call.module)
        if again is not None:
            _check_repetition(again, facts)
            continue
        if facts.causal and facts.layer in layers:
            raise BackendError(
                f"{name} and {layers[facts.layer]} have the same layer_idx {facts.layer}: "
                "it must tell their caches apart."
            )
        layers[facts.layer], by_module[call.module] = name, facts
        found.append(facts)
    if len({facts.causal for facts in found}) > 1:
        raise BackendError(f"{type(base).__name__} has causal and bidirectional layers in one model.")
    return found


def _check_repetition(first: AttentionFacts, again: AttentionFacts) -> None:
    """Layers that share their parameters call one module several times: fine where nothing is kept between calls.

    Raises:
        BackendError: it keeps keys and values, or its calls differ.
    """
    shared = not first.causal and not again.causal
    if not shared or _without_layer(first) != _without_layer(again):
        raise BackendError(f"{first.name} calls attention more than once in one forward; each module may call it once.")


def _without_layer(facts: AttentionFacts) -> tuple[Any, ...]:
    names = ("num_heads", "num_kv_heads", "head_size", "v_head_size", "scaling", "window", "softcap", "sinks")
    return tuple(getattr(facts, name) for name in names)


def _read_call(name: str, call: Call, mask: MaskFacts | None, order: int) -> AttentionFacts:
    given = {key: value for key, value in call.facts.items() if value is not None}
    unknown = sorted(key for key in given if key not in _APPLIED and key not in _WITHOUT_MEANING)
    unknown = [key for key in unknown if given[key] is not False]
    if unknown:
        raise BackendError(f"{name} gives its attention {', '.join(unknown)}, which is not known here.")
    causal, window = _keys_seen(name, call, mask)
    (_, heads, length, size), (_, kv_heads, keys, k_size), v_size = call.q, call.k, call.v[-1]
    if length != TOKENS or keys != TOKENS or size != k_size:
        raise BackendError(f"{name} attends {length} queries of size {size} over {keys} keys of size {k_size}.")
    if heads % kv_heads:
        raise BackendError(f"{name} has {heads} query heads over {kv_heads} key heads, which do not divide.")
    scaling = given.get("scaling")
    return AttentionFacts(
        name, call.module, _layer(name, call.module, causal, order), heads, kv_heads, size, v_size,
        size**-0.5 if scaling is None else _number(scaling, name),
        window, _optional(given.get("softcap"), name), "s_aux" in given, causal,
    )  # fmt: skip


def _keys_seen(name: str, call: Call, mask: MaskFacts | None) -> tuple[bool, int | None]:
    """Whether the call is causal, and its window: as its mask says, which is what Transformers' own attention applies;
    without a mask, as its arguments do."""
    window = _window(call.facts.get("sliding_window"), name)
    if mask is None:
        causal = call.facts.get("is_causal")
        causal = bool(getattr(call.module, "is_causal", True) if causal is None else causal)
        return causal, window
    return mask.causal, mask.window


def _layer(name: str, module: nn.Module, causal: bool, order: int) -> int:
    if not causal:
        return order
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise BackendError(f"{name} has no integer layer_idx ({layer!r}): it must tell its cache from others'.")
    return layer


def _number(value: Any, name: str) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
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
