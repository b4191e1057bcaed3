"""The config stage: from files to `ModelConfig`, every decision on the trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelbay.config import facts
from modelbay.config.architectures import architecture_names
from modelbay.config.classes import ConfigObject, build_config, build_nested
from modelbay.config.dtype import resolve_dtype
from modelbay.config.generation import default_generation, stop_ids
from modelbay.config.layers import layer_types
from modelbay.config.length import max_model_len
from modelbay.config.limits import MAX_LAYERS, check_size, check_values
from modelbay.config.model_config import ModelConfig
from modelbay.config.origins import Origins, joined
from modelbay.config.overrides import check_keys, merge
from modelbay.config.patches import apply_patches
from modelbay.config.reader import check_depth, read_raw
from modelbay.config.rope_facts import rope
from modelbay.config.text import TextConfig, find_text
from modelbay.errors import UsageError
from modelbay.pooling.transformer import max_length as sentence_length

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.plugins import Plugins
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace


def load_config(files: ModelFiles, plugins: Plugins, args: EngineArgs, trace: Trace) -> ModelConfig:
    """Walk C1-C11 and append every decision to ``trace``.

    Raises:
        ConfigError: the config is unreadable, contradictory, or of a type that nobody knows.
        TrustError: only code in the repository could read it, and it is not trusted.
        UsageError: an argument asks for what the model does not have.
    """
    written, origins = read_raw(files, plugins, args, trace)
    raw = _overridden(written, args.hf_overrides, origins, trace)
    check_values(raw)
    patched = apply_patches(raw, plugins, origins, trace)
    built = build_config(raw, patched, files, plugins, args, trace)
    text, built_text = _text(patched, built, plugins, trace)
    if args.hf_overrides:
        check_keys(written, args.hf_overrides, built.hf, text.path)
    reader = facts.FactReader(text, built_text.origin, built_text.aliases, origins)
    config = _facts(patched, built.hf, reader, files, plugins, args, trace)
    for fact, source in config.sources.items():
        trace.decide("config", fact, _shown(getattr(config, fact)), source)
    return config


def _overridden(
    written: Mapping[str, Any], overrides: Mapping[str, Any] | None, origins: Origins, trace: Trace
) -> dict[str, Any]:
    if not overrides:
        return dict(written)
    if not isinstance(overrides, Mapping):
        raise UsageError(f"hf_overrides must be an object of config keys and values, got {overrides!r}.")
    check_depth(overrides, "hf_overrides")
    argument = trace.argument("hf_overrides")
    trace.decide("config", "overrides", dict(overrides), argument)
    merged = merge(written, overrides)
    origins.override(written, merged, overrides, argument)
    return merged


def _text(
    patched: Mapping[str, Any], built: ConfigObject, plugins: Plugins, trace: Trace
) -> tuple[TextConfig, ConfigObject]:
    """The text config, its object made by its own class where the outer class kept a dict."""
    text = find_text(patched, built.hf)
    if text.obj is built.hf:
        return text, built
    if text.obj is None or isinstance(text.obj, Mapping):
        nested = build_nested(text.raw, plugins)
    else:
        # An object of Transformers knows its own aliases; a remote class may nest one of Transformers' classes.
        origin = "transformers" if type(text.obj).__module__.startswith("transformers.") else built.origin
        nested = ConfigObject(text.obj, origin, built.aliases)
    where = ".".join(text.path) or "nested by the config class"
    trace.decide("config", "text config", type(nested.hf).__name__, where)
    return TextConfig(text.raw, nested.hf, text.path, text.by_class), nested


def _facts(
    raw: Mapping[str, Any],
    hf: Any,
    reader: facts.FactReader,
    files: ModelFiles,
    plugins: Plugins,
    args: EngineArgs,
    trace: Trace,
) -> ModelConfig:
    text = reader.text
    names, names_source = architecture_names(raw, text.path, plugins, args, reader.origins)
    reader.note("architectures", names, names_source)
    vocab_size = reader.required_int("vocab_size", "vocab_size")
    hidden_size = reader.required_int("hidden_size", "hidden_size")
    num_layers = reader.required_int("num_layers", "num_hidden_layers")
    check_size("num_hidden_layers", num_layers, MAX_LAYERS, "layers")
    num_heads, num_kv_heads, head_size = facts.heads(reader, hidden_size)
    kinds, window = layer_types(reader, num_layers, trace)
    rope_specs = rope(reader, head_size, trace)
    dtype = resolve_dtype(args.dtype, args.device, raw, text.path, reader.origins, files, trace)
    generation, generation_stop, generation_source = default_generation(files, args.generation_config, trace)
    length = max_model_len(
        reader, rope_specs, files.read_json("tokenizer_config.json"), args.max_model_len, trace,
        sentence_limit=None if args.runner == "generate" else sentence_length(files),
    )  # fmt: skip
    reader.note("dtype", dtype.run, dtype.source)
    stop, stop_sources = stop_ids(raw, text.raw, text.path, reader.origins)
    stop = tuple(dict.fromkeys([*stop, *generation_stop]))
    stop_sources += [generation_source] if generation_stop else []
    reader.note("eos_token_ids", stop, joined(stop_sources) or "derived: neither config nor generation config has one")
    return ModelConfig(
        model_type=str(raw.get("model_type") or getattr(hf, "model_type", "")),
        architectures=names,
        raw=raw,
        hf=hf,
        text=text.obj,
        text_path=text.path,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=facts.intermediate_size(reader),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        layer_types=kinds,
        sliding_window=window,
        rope=rope_specs,
        max_model_len=length,
        dtype=dtype.run,
        checkpoint_dtype=dtype.checkpoint,
        tie_word_embeddings=facts.tie_word_embeddings(reader, raw, hf),
        num_experts=facts.experts(reader),
        quantization=facts.quantization(reader, raw),
        eos_token_ids=stop,
        generation=generation,
        sources=reader.sources,
        origins=reader.origins,
        per_layer=tuple(reader.per_layer),
        backbone_dtypes=dtype.backbones,
    )


def _shown(value: Any) -> Any:
    """A fact as JSON: layer types counted, RoPE as plain objects."""
    if isinstance(value, tuple) and value and len(value) > 4 and len(set(value)) <= len(value) // 2:
        return {kind: value.count(kind) for kind in dict.fromkeys(value)}
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in value.items()}
    if hasattr(value, "rotary_dim"):
        return {"type": value.type, "theta": value.theta, "rotary_dim": value.rotary_dim, **value.parameters}
    return list(value) if isinstance(value, tuple) else value
