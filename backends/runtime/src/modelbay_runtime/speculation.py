"""Speculative decoding as it is asked for: `EngineArgs.speculative_config`, and whether the model can do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelbay.args import EngineArgs
from modelbay.errors import UsageError
from modelbay.resolve import Resolution

if TYPE_CHECKING:
    from modelbay_runtime.api import BuildContext

METHODS = ("mtp",)
#: Its draft layer was trained to look one token beyond the next.
_MOST = 1


def draft_tokens(args: EngineArgs) -> int:
    """How many tokens are guessed in a step; 0 without speculative decoding.

    Raises:
        UsageError: a method or key that is not known, or a number that is not served.
    """
    config = args.speculative_config
    if config is None:
        return 0
    unknown = sorted(set(map(str, config)) - {"method", "num_speculative_tokens"})
    if unknown:
        raise UsageError(
            f"speculative_config has {', '.join(unknown)}; method and num_speculative_tokens are what it takes."
        )
    method, count = config.get("method"), config.get("num_speculative_tokens", _MOST)
    if method not in METHODS:
        raise UsageError(
            f"speculative_config: the method {method!r} is not served; {', '.join(METHODS)} is.",
            hint="mtp drafts with a layer of the model's own that predicts the token after the next.",
        )
    if type(count) is not int or count != _MOST:
        raise UsageError(f"speculative_config: num_speculative_tokens is {count!r}; with mtp it is {_MOST}.")
    return count


def check_drafts(module: Any, resolution: Resolution, build: BuildContext) -> None:
    """Refuse what would not draft.

    Raises:
        UsageError: the model has no draft layer, or ranks are arranged so that it cannot be used.
    """
    if not build.draft_tokens:
        return
    mesh = build.parallel.mesh
    if mesh.pp > 1:
        raise UsageError("speculative_config: drafts are not made over the stages of a pipeline.")
    if mesh.expert_parallel and mesh.dp > 1:
        raise UsageError("speculative_config: drafts are not made where replicas share experts.")
    if not getattr(module, "can_draft", False):
        raise UsageError(
            f"speculative_config: {resolution.architecture}, as {resolution.backend} builds it from this config, has "
            "no layer to draft with.",
            hint="mtp needs a checkpoint with num_nextn_predict_layers, and a native model that uses them.",
        )
    resolution.trace.decide("build", "speculative decoding", f"mtp, {build.draft_tokens} token", "speculative_config")
