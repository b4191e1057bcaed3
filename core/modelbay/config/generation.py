"""Default sampling and stop tokens that the checkpoint brings (C10)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelbay.config.origins import Origins
from modelbay.errors import ConfigError, UsageError
from modelbay.small_files import read_text

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

GENERATION_FILE = "generation_config.json"
#: The keys that are default sampling, and what a request calls them (C10).
SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
#: What changes the output elsewhere and is not done here: key -> the values with which it changes nothing. Null never
#: does. Lengths (max_length, min_length) are the request's business.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": ([],),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "forced_decoder_ids": ([],),
    "sequence_bias": ([], {}),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "prompt_lookup_num_tokens": (),
    "num_return_sequences": (1,),
}


def default_generation(files: ModelFiles, choice: str, trace: Trace) -> tuple[dict[str, Any], tuple[int, ...], str]:
    """``(default sampling, stop ids, their source)`` of generation_config.json.

    ``choice``: "auto" reads the model's file; "modelbay" ignores its sampling, yet keeps its stop ids, which are facts
    about the model and not a taste; anything else is a directory (or a JSON file) to read instead.
    """
    values, source = _read(files, choice)
    stop, stop_source = token_ids(values.get("eos_token_id"), f"{source}'s eos_token_id"), f"{source} (eos_token_id)"
    if choice == "modelbay":
        trace.decide("config", "default sampling", {}, f"modelbay, by {trace.argument('generation_config')}")
        return {}, stop, stop_source
    sampling = {key: values[key] for key in SAMPLING_KEYS if values.get(key) is not None}
    greedy = ""
    if values.get("do_sample") is False:
        # Greedy, as Transformers reads it, whatever else stands there. Where do_sample is absent nothing is decided: a
        # request samples as if there were no file.
        sampling["temperature"] = 0.0
        greedy = "; temperature derived: do_sample is false"
    trace.decide("config", "default sampling", sampling, source + greedy if values else f"no {GENERATION_FILE}")
    _warn_of_the_rest(values, source, trace)
    return sampling, stop, stop_source


def is_elsewhere(choice: str) -> bool:
    """Whether the argument ``generation_config`` names a place that is not the model's."""
    return choice not in ("auto", "modelbay")


def _warn_of_the_rest(values: Mapping[str, Any], source: str, trace: Trace) -> None:
    """Name what would change the output in Transformers and does not here."""
    rest = {
        key: values[key]
        for key, neutral in WITHOUT_EFFECT.items()
        if values.get(key) is not None and values[key] not in neutral
    }
    if rest:
        trace.warn(
            "config",
            "generation settings without effect",
            {key: _shortened(value) for key, value in rest.items()},
            f"{source} has them; what a request can ask for is default sampling and stop tokens",
        )


def _shortened(value: Any) -> Any:
    return f"{len(value)} entries" if isinstance(value, list | dict) and len(value) > 8 else value


def stop_ids(
    raw: Mapping[str, Any], text_raw: Mapping[str, Any], text_path: tuple[str, ...], origins: Origins
) -> tuple[tuple[int, ...], list[str]]:
    """The union of the text config's and the outer config's ids, and where they stand.

    A class default does not count: it is a number that was true of the family's first checkpoint.
    """
    ids: list[int] = []
    sources: list[str] = []
    for path, level in ((text_path, text_raw), ((), raw)):
        found = token_ids(level.get("eos_token_id"), "the config's eos_token_id")
        ids += found
        sources += [origins.of((*path, "eos_token_id"))] if found else []
    return tuple(dict.fromkeys(ids)), sources


def token_ids(value: Any, what: str) -> tuple[int, ...]:
    """A token id, a list of them, or null."""
    ids = value if isinstance(value, list | tuple) else [value]
    ids = [item for item in ids if item is not None]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise ConfigError(f"{what} must be a token id or a list of them, got {value!r}.")
    return tuple(item for item in ids if item >= 0)


def _read(files: ModelFiles, choice: str) -> tuple[Mapping[str, Any], str]:
    if not is_elsewhere(choice):
        return files.read_json(GENERATION_FILE) or {}, GENERATION_FILE
    path = Path(choice).expanduser()
    path = path / GENERATION_FILE if path.is_dir() else path
    try:
        values = json.loads(read_text(path))
    except FileNotFoundError:
        raise UsageError(
            f"generation_config {choice!r} has no {GENERATION_FILE}.",
            hint="Give auto, modelbay, or a directory that has one.",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return values, str(path)
