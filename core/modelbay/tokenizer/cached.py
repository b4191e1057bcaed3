"""The cached, thread-safe tokenizer (T2).

`cached` gives a tokenizer a subclass of its own class, so it is still what Transformers returned: same methods, same
return types. Two things change:

* What Transformers computes anew on every access (special ids, vocabulary, length) is computed once, and again after
  the tokens change.
* Truncation and padding are settings *of* the Rust tokenizer, which Transformers changes on every call that differs
  from the one before. With threads that means "Already borrowed", or another thread's truncation. Here the shared
  Rust tokenizer is never changed: calls that need settings run one at a time on a private copy of it.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from modelbay.tokenizer.cuts import Cuts, described, find_cuts

#: Where a tokenizer that was switched to another engine keeps the one it had, for what the other does not do.
ORIGINAL_ENGINE = "_modelbay_original_engine"
_STATE = "_modelbay_state"
#: The methods of Transformers that hand a text to the Rust tokenizer as it is.
_KNOWN_METHODS = ("PreTrainedTokenizerBase.__call__", "TokenizersBackend._encode_plus")


def cached(tokenizer: Any) -> Any:
    """The same object, cached and thread-safe. Doing it twice changes nothing."""
    cls: Any = type(tokenizer)
    if getattr(cls, "_modelbay_cached", False):
        return tokenizer
    tokenizer.__class__ = _subclass(cls)
    tokenizer.__dict__[_STATE] = _State()
    if getattr(tokenizer, "is_fast", False):
        # A tokenizer.json may come with its own settings; Transformers drops them at the first call without any.
        tokenizer._tokenizer.no_truncation()
        tokenizer._tokenizer.no_padding()
    return tokenizer


class _State:
    """What belongs to one instance and is never pickled: values by name, the private copies, and their lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[str, Any] = {}
        self.private: dict[bool, Any] = {}


class CachedTokenizer:
    """The methods of the subclass; mixed in before the tokenizer's own class."""

    _modelbay_cached = True

    def _modelbay_value(self, name: str, compute: Callable[[], Any]) -> Any:
        values = self.__dict__[_STATE].values
        if name not in values:
            values[name] = compute()
        return values[name]

    def _modelbay_changed(self) -> None:
        """The tokens changed: forget what was computed from them."""
        state = self.__dict__.get(_STATE)
        if state is not None:
            state.values = {}
            state.private = {}

    # -- cached values ------------------------------------------------------------------------------------------

    @property
    def all_special_tokens(self) -> list[str]:
        values = self.__dict__[_STATE].values
        if "special_tokens" not in values:
            values["special_tokens"] = super().all_special_tokens  # type: ignore[misc]
        return list(values["special_tokens"])

    @property
    def all_special_ids(self) -> list[int]:
        values = self.__dict__[_STATE].values
        if "special_ids" not in values:
            values["special_ids"] = super().all_special_ids  # type: ignore[misc]
        return list(values["special_ids"])

    def get_vocab(self) -> dict[str, int]:
        return dict(self._modelbay_vocab())

    @property
    def max_token_id(self) -> int:
        """The largest id the tokenizer can produce."""
        return self._modelbay_value("max_id", lambda: max(self._modelbay_vocab().values(), default=-1))

    @property
    def longest_token(self) -> str:
        """The longest token, as it is spelled in the vocabulary."""
        return self._modelbay_value("longest", lambda: max(self._modelbay_vocab(), key=len, default=""))

    @property
    def adds_bos(self) -> bool:
        """Whether encoding a text puts the BOS token before it."""
        return self._modelbay_value("adds_bos", self._modelbay_adds_bos)

    def _modelbay_adds_bos(self) -> bool:
        bos = self.bos_token_id  # type: ignore[attr-defined]
        return bos is not None and self("a")["input_ids"][:1] == [bos]  # type: ignore[operator]

    @property
    def text_cuts(self) -> Cuts:
        """Where texts may be cut."""
        return self._modelbay_value("cuts", self._modelbay_cuts)

    def _modelbay_cuts(self) -> Cuts:
        cls = _plain_class(type(self))
        methods = (cls.__call__, getattr(cls, "_encode_plus", None))
        # A class with its own way to encode may do anything to a text.
        if not all(getattr(method, "__qualname__", None) in _KNOWN_METHODS for method in methods):
            return Cuts()
        engine = self.__dict__.get(ORIGINAL_ENGINE, self._tokenizer)  # type: ignore[attr-defined]
        return find_cuts(engine, self._modelbay_vocab(), self.added_tokens_decoder.values())  # type: ignore[attr-defined]

    @property
    def lowering(self) -> Any:
        """A copy that lower-cases texts, but for the special tokens in them, before all else that it does to them; None
        of a tokenizer without a Rust engine.

        As sentence-transformers does it (``do_lower_case``): character by character, once special tokens were found.
        """
        return self._modelbay_value("lowering", self._modelbay_lowering)

    def _modelbay_lowering(self) -> Any:
        if not self.is_fast:  # type: ignore[attr-defined]
            return None
        engine = copy.deepcopy(self.__dict__.get(ORIGINAL_ENGINE, self._tokenizer))  # type: ignore[attr-defined]
        _lower_first(engine)
        values = {name: value for name, value in self.__dict__.items() if name not in (_STATE, ORIGINAL_ENGINE)}
        return _restore(_plain_class(type(self)), {**values, "_tokenizer": engine})

    def _modelbay_vocab(self) -> dict[str, int]:
        return self._modelbay_value("vocab", lambda: super(CachedTokenizer, self).get_vocab())  # type: ignore[misc]

    def __len__(self) -> int:
        return self._modelbay_value("length", lambda: super(CachedTokenizer, self).__len__())  # type: ignore[misc]

    # -- what changes the tokens --------------------------------------------------------------------------------

    def _add_tokens(self, *args: Any, **kwargs: Any) -> int:
        state = self.__dict__[_STATE]
        with state.lock:
            added = super()._add_tokens(*args, **kwargs)  # type: ignore[misc]
            original = self.__dict__.get(ORIGINAL_ENGINE)
            if original is not None:
                _on_engine(self, original)._add_tokens(*args, **kwargs)
            self._modelbay_changed()
        return added

    def add_special_tokens(self, *args: Any, **kwargs: Any) -> int:
        added = super().add_special_tokens(*args, **kwargs)  # type: ignore[misc]
        self._modelbay_changed()
        return added

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._modelbay_changed()

    # -- threads ------------------------------------------------------------------------------------------------

    def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_fast:  # type: ignore[attr-defined]
            return super()._encode_plus(*args, **kwargs)  # type: ignore[misc]
        switched = ORIGINAL_ENGINE in self.__dict__
        if not switched or _needs_original(args, kwargs):
            return self._encode_on(switched, args, kwargs)
        try:
            return self._encode_on(False, args, kwargs)
        except ValueError:
            # A byte that the vocabulary lacks: the other engine refuses the text, the tokenizer itself drops the byte.
            return self._encode_on(True, args, kwargs)

    def _encode_on(self, original: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Encode on the present engine, or on the one that it replaced; settings of one call never reach another."""
        if not original and not _needs_settings(self, kwargs):
            return super()._encode_plus(*args, **kwargs)  # type: ignore[misc]
        state = self.__dict__[_STATE]
        with state.lock:
            if original not in state.private:
                engine = self.__dict__[ORIGINAL_ENGINE] if original else self._tokenizer  # type: ignore[attr-defined]
                state.private[original] = copy.deepcopy(engine)
            return _on_engine(self, state.private[original])._encode_plus(*args, **kwargs)

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **kwargs: Any
    ) -> list[str]:
        if ORIGINAL_ENGINE not in self.__dict__:
            return super().tokenize(text, pair=pair, add_special_tokens=add_special_tokens, **kwargs)  # type: ignore[misc]
        kwargs["return_offsets_mapping"] = True  # needs the original engine, and so gets it
        return self._encode_plus(text, pair, add_special_tokens=add_special_tokens, **kwargs).tokens()

    # -- copies and pickles -------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = {name: value for name, value in self.__dict__.items() if name != _STATE}
        return _restore, (_plain_class(type(self)), values)


def _restore(cls: type, values: dict[str, Any]) -> Any:
    tokenizer: Any = object.__new__(cls)
    tokenizer.__dict__.update(values)
    return cached(tokenizer)


@cache
def _subclass(cls: type) -> type:
    """One subclass per tokenizer class, under its name; a pure function of the class, so sharing it is harmless."""
    return type(cls.__name__, (CachedTokenizer, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _plain_class(cls: type) -> type:
    return cls.__bases__[-1] if getattr(cls, "_modelbay_cached", False) else cls


def _on_engine(tokenizer: Any, engine: Any) -> Any:
    """The tokenizer as its own plain class, on another Rust engine. Shares everything else."""
    view: Any = object.__new__(_plain_class(type(tokenizer)))
    view.__dict__.update(tokenizer.__dict__)
    view.__dict__["_tokenizer"] = engine
    return view


def _lower_first(engine: Any) -> None:
    """The normaliser is made by the engine's own class of its description: the Rust package is not imported here."""
    parts = list(described(engine.normalizer))
    if any(part["type"] == "Lowercase" for part in parts):
        return
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *parts]}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    description = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    engine.normalizer = type(engine).from_str(json.dumps(description)).normalizer


def _needs_settings(tokenizer: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call would change the settings of the Rust tokenizer."""
    if any(_is_set(kwargs.get(name)) for name in ("padding_strategy", "truncation_strategy")):
        return True
    split = kwargs.get("split_special_tokens")
    split = tokenizer.split_special_tokens if split is None else split
    return bool(split) != bool(tokenizer._tokenizer.encode_special_tokens)


def _is_set(strategy: Any) -> bool:
    return strategy is not None and strategy.value not in ("do_not_pad", "do_not_truncate")


def _needs_original(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """What fastokens does not do: pairs, words, offsets."""
    pair = args[1] if len(args) > 1 else kwargs.get("text_pair")
    text = args[0] if args else kwargs.get("text")
    pairs = isinstance(text, list | tuple) and any(not isinstance(item, str) for item in text)
    wanted = ("is_split_into_words", "return_offsets_mapping", "return_overflowing_tokens")
    return pair is not None or pairs or any(kwargs.get(name) for name in wanted)
