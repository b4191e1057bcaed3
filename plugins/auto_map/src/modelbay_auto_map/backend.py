"""The backend: which class the repository names, whether it may run, and whether it keeps the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelbay.backends import Verdict
from modelbay.errors import BackendError, ModelbayError, one_line

if TYPE_CHECKING:
    from torch import nn

    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.plugins import Plugins
    from modelbay.resolve import Resolution
    from modelbay.source import ModelFiles
    from modelbay.specs import ArchSpec
    from modelbay_runtime.api import BuildContext


class AutoMapBackend:
    """See `modelbay.backends.ModelingBackend`. The module is assembled by the Transformers backend."""

    def assess(
        self, files: ModelFiles, config: ModelConfig, arch: ArchSpec | None, args: EngineArgs, plugins: Plugins
    ) -> Verdict:
        """From what the config names alone: no code of the repository is imported before it is built."""
        auto_map = config.raw.get("auto_map") or {}
        if "AutoModel" not in auto_map:
            return Verdict(False, _no_base(auto_map))
        named = f"auto_map.AutoModel is {auto_map['AutoModel']}"
        if config.raw.get("is_encoder_decoder"):
            return Verdict(False, f"{named}, but encoder-decoder models are not served")
        if args.trust_remote_code is not True:
            return Verdict(
                False,
                f"{named}, code of {files.reference}, which is not trusted: read it, then pass --trust-remote-code",
            )
        return Verdict(True, named)

    def build(self, resolution: Resolution, build: BuildContext) -> nn.Module:
        """The wrapped module, parameters on meta.

        Raises:
            BackendError: the rule that the model breaks, or what its code raised.
            RemoteCodeError: its code is absent or failed while it was imported.
        """
        from modelbay.trust import contained
        from modelbay_auto_map.classes import find_classes
        from modelbay_auto_map.rules import check_instance
        from modelbay_transformers.assemble import assemble

        classes = find_classes(resolution)
        try:
            with contained(f"{classes.base.__name__} of {resolution.files.reference}, while it was built,"):
                return assemble(
                    classes, resolution, build, check=lambda outer, base: check_instance(classes, outer, base)
                )
        except ModelbayError:
            raise
        except Exception as error:
            raise BackendError(
                f"{classes.base.__name__} of {resolution.files.reference} raised {type(error).__name__} "
                f"while it was built: {one_line(error)}"
            ) from error

    def dry_run(self, resolution: Resolution) -> None:
        from modelbay_runtime.build import build_model

        build_model(resolution)


def _no_base(auto_map: dict[str, Any]) -> str:
    if not auto_map:
        return "the config has no auto_map"
    return (
        f"auto_map has {', '.join(sorted(auto_map))} and no AutoModel, which must name the base model's class "
        "(MyModel, not MyModelForCausalLM)"
    )
