"""Reading single facts off a config: JSON first, then the class's default, then a derivation, each with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelbay.config.limits import MAX_HEAD_SIZE, check_size
from modelbay.config.names import COMMON_ALIASES
from modelbay.config.origins import Origins
from modelbay.config.plain import NULL_IS_A_VALUE
from modelbay.config.text import TextConfig
from modelbay.errors import ConfigError


@dataclass(slots=True)
class FactReader:
    """The text config's facts, and the record of where each came from.

    Args:
        text: the text config.
        origin: "own", "transformers" or "remote" (`classes.ConfigObject`).
        aliases: further names per fact, from the config class's plugin.
        origins: where the values of the whole config stand.
        sources: filled as facts are read: fact → source.
        per_layer: filled with the keys whose value differs from layer to layer.
    """

    text: TextConfig
    origin: str
    aliases: Mapping[str, tuple[str, ...]]
    origins: Origins = field(default_factory=Origins)
    sources: dict[str, str] = field(default_factory=dict)
    per_layer: list[str] = field(default_factory=list)

    def find(self, key: str) -> tuple[Any, str] | None:
        """The value of a config key and its source; None if neither JSON nor class says it.

        An explicit null is absent, except for the keys whose null is a value (then the value is None).
        Transformers' classes hold the JSON under their own names, and some rewrite it (interleaved layers counted
        twice on disk): there the object is the reading of the JSON, and the JSON itself comes after it.
        """
        if self.origin != "transformers":
            if found := self._json(key) or self._json_aliases(key):
                return found
            value = self._attribute(key)
            return None if value is None else (value, self._attribute_source(key, value))
        value = self._attribute(key)
        if value is not None:
            return value, self._attribute_source(key, value)
        return self._json(key) or self._json_aliases(key)

    def optional_int(self, fact: str, key: str) -> int | None:
        """A count that may be missing. A list of equal counts (one per layer) is one count."""
        found = self.find(key)
        if found is None or found[0] is None:
            return None
        value, source = found
        if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
            value, source = value[0], f"derived: the same for every layer in {source}"
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"the config's {key} must be a whole number, got {value!r} ({source}).")
        self.sources[fact] = source
        return value

    def required_int(self, fact: str, key: str) -> int:
        """A positive count that a language model cannot do without."""
        value = self.optional_int(fact, key)
        if not value:
            names = ", ".join((key, *self._other_names(key)))
            where = ".".join(self.text.path) or "the config"
            raise ConfigError(
                f"{where} has no {key} ({value!r}; looked for {names}), and its class "
                f"{type(self.text.obj).__name__} no default.",
                hint=f'Give it with hf_overrides, e.g. {{"{key}": …}}, if the model has one.',
            )
        return value

    def note(self, fact: str, value: Any, source: str) -> Any:
        self.sources[fact] = source
        return value

    def _json(self, key: str) -> tuple[Any, str] | None:
        raw = self.text.raw
        if raw.get(key) is not None or (key in raw and key in NULL_IS_A_VALUE):
            return raw[key], self.json_source(key)
        return None

    def _json_aliases(self, key: str) -> tuple[Any, str] | None:
        for name in self._other_names(key):
            if self.text.raw.get(name) is not None:
                return self.text.raw[name], self.json_source(name)
        return None

    def _other_names(self, key: str) -> tuple[str, ...]:
        return (*self.aliases.get(key, ()), *COMMON_ALIASES.get(key, ()))

    def json_source(self, name: str) -> str:
        """Where what the text config says under this key stands."""
        return self.origins.of((*self.text.path, name), self.text.raw.get(name))

    def _attribute(self, key: str) -> Any:
        values = (self._read(name) for name in (key, *self._other_names(key)))
        return next((value for value in values if value is not None), None)

    def _read(self, name: str) -> Any:
        """An attribute, or the largest of what it is in the layers, where the class says it only of each of them."""
        try:
            return getattr(self.text.obj, name, None)
        except Exception:
            values = per_layer_values(self.text.obj, name)
        if not values or any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            return read_attribute(self.text.obj, name)
        if len(set(values)) > 1 and name not in self.per_layer:
            self.per_layer.append(name)
        return max(values)

    def _attribute_source(self, key: str, value: Any) -> str:
        """Whether the class took the value from the JSON under its own name, has it as default, or computed it."""
        cls = type(self.text.obj)
        if key in self.per_layer:
            return f"derived: by {cls.__name__}, the largest, since it differs from layer to layer"
        name = getattr(cls, "attribute_map", {}).get(key, key)
        for said in dict.fromkeys((name, key, *self._other_names(key))):
            if self.text.raw.get(said) == value:
                return self.json_source(said)
        return class_source(self.text.obj, name, value)


def class_source(obj: Any, name: str, value: Any) -> str:
    """Of what the JSON does not say: whether it is the class's default, or computed by it."""
    cls = type(obj)
    fields = getattr(cls, "__dataclass_fields__", {})
    default = fields[name].default if name in fields else getattr(cls, name, None)
    return "class default" if default == value else f"derived: by {cls.__name__}"


def read_attribute(obj: Any, name: str) -> Any:
    """An attribute of a config object, None if it has none.

    Raises:
        ConfigError: the class refuses to say it, because it differs from layer to layer.
    """
    try:
        return getattr(obj, name, None)
    except Exception as error:
        reason = str(error).partition(". ")[0]
        raise ConfigError(f"the config's {name} is not one value for the whole model: {reason}.") from error


def per_layer_values(obj: Any, name: str) -> list[Any]:
    """An attribute in each layer, by the configs that a class of Transformers keeps for them; null is absent."""
    try:
        layers = list(obj.per_layer_config)
    except Exception:
        return []
    return [value for layer in layers if (value := getattr(layer, name, None)) is not None]


def heads(reader: FactReader, hidden_size: int) -> tuple[int, int, int]:
    """``(num_heads, num_kv_heads, head_size)`` (C6); all 0 for a model without attention.

    Raises:
        ConfigError: no head size is given, and the hidden size is not a multiple of the heads.
    """
    num_heads = reader.optional_int("num_heads", "num_attention_heads")
    if not num_heads:
        for fact in ("num_heads", "num_kv_heads", "head_size"):
            reader.note(fact, 0, "derived: the config has no attention heads")
        return 0, 0, 0
    head_size = _head_size(reader, hidden_size, num_heads)
    check_size("head_dim", head_size, MAX_HEAD_SIZE, "dimensions of a head")
    return num_heads, _kv_heads(reader, num_heads), head_size


def _kv_heads(reader: FactReader, num_heads: int) -> int:
    multi_query = reader.find("multi_query")
    if multi_query and multi_query[0]:  # no text: `limits.check_values`
        return reader.note("num_kv_heads", 1, f"derived: multi_query is true ({multi_query[1]})")
    value = reader.optional_int("num_kv_heads", "num_key_value_heads")
    if value is None:
        return reader.note("num_kv_heads", num_heads, "derived: as many as attention heads")
    if value < 1 or num_heads % value:
        raise ConfigError(f"the config's {num_heads} attention heads cannot share {value} KV heads evenly.")
    return value


def _head_size(reader: FactReader, hidden_size: int, num_heads: int) -> int:
    value = reader.optional_int("head_size", "head_dim")
    if value:
        return value
    if hidden_size % num_heads:
        raise ConfigError(
            f"the config has no head_dim, and its hidden_size {hidden_size} is not a multiple of {num_heads} heads.",
            hint='Give it with hf_overrides, e.g. {"head_dim": 128}.',
        )
    return reader.note(
        "head_size", hidden_size // num_heads, f"derived: hidden_size / heads = {hidden_size}/{num_heads}"
    )


def intermediate_size(reader: FactReader) -> int | None:
    """The MLP's width, None where the config gives none or one per layer."""
    found = reader.find("intermediate_size")
    if found and isinstance(found[0], list | tuple) and _are_counts(found[0]) and len(set(found[0])) > 1:
        return reader.note("intermediate_size", None, f"derived: differs from layer to layer ({found[1]})")
    return reader.optional_int("intermediate_size", "intermediate_size") or None


def _are_counts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)


def experts(reader: FactReader) -> int | None:
    """How many routed experts a layer has, None for a dense model.

    Raises:
        ConfigError: the JSON sends a token to none of them, or to more than there are.
    """
    count = reader.optional_int("num_experts", "num_experts") or None
    key = "num_experts_per_tok"
    chosen = reader.text.raw.get(key)
    if count is None or count == 1 or chosen is None:
        return count
    if not _are_counts(chosen if isinstance(chosen, list | tuple) else [chosen]):
        raise ConfigError(f"the config's {key} must be a positive whole number, got {chosen!r}.")
    if max(chosen if isinstance(chosen, list | tuple) else [chosen], default=0) > count:
        raise ConfigError(f"the config's {key} is {chosen!r}, and there are {count} experts.")
    return count


def tie_word_embeddings(reader: FactReader, raw: Mapping[str, Any], hf: Any) -> bool:
    """Whether the head is the embedding: the text config's flag, else the outer JSON's, else the class's (W5)."""
    key = "tie_word_embeddings"
    inner, outer = reader.text.raw.get(key), raw.get(key)
    for said in (inner, outer):
        if said not in (None, False, True):
            raise ConfigError(f"the config's {key} must be true or false, got {said!r}.")
    if inner is not None:
        return reader.note(key, bool(inner), reader.json_source(key))
    if outer is not None:
        return reader.note(key, bool(outer), reader.origins.of((key,)))
    for obj in (reader.text.obj, hf):
        value = read_attribute(obj, key)
        if value is not None:
            return reader.note(key, bool(value), class_source(obj, key, value))
    return reader.note(key, False, "derived: not said")


def quantization(reader: FactReader, raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization_config``, the model's or its text model's, under today's or its former name."""
    for path, level in (((), raw), (reader.text.path, reader.text.raw)):
        for key in ("quantization_config", "compression_config"):
            value = level.get(key)
            if value and not isinstance(value, Mapping):
                raise ConfigError(f"the config's {key} must be an object, got {value!r}.")
            if value:
                reader.note("quantization", value, reader.origins.of((*path, key), value))
                return dict(value)
    return None
