"""The backend: assess from names alone, build on meta, probe, and wrap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from modelbay.backends import Verdict
from modelbay.errors import BackendError, ModelbayError, one_line
from modelbay_transformers.refusals import REFUSED

if TYPE_CHECKING:
    from torch import nn

    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.plugins import Plugins
    from modelbay.resolve import Resolution
    from modelbay.source import ModelFiles
    from modelbay.specs import ArchSpec
    from modelbay_runtime.api import BuildContext
    from modelbay_runtime.multimodal.data import MediaProcessor


class TransformersBackend:
    """See `modelbay.backends.ModelingBackend`."""

    def assess(
        self, files: ModelFiles, config: ModelConfig, arch: ArchSpec | None, args: EngineArgs, plugins: Plugins
    ) -> Verdict:
        """From what the config names alone; whether the model's code is compatible is for `build` to probe."""
        if config.raw.get("is_encoder_decoder"):
            return Verdict(False, "encoder-decoder models are not served")
        if config.model_type in REFUSED:
            return Verdict(False, REFUSED[config.model_type])
        if not known_to_transformers(config.model_type):
            return Verdict(False, f"Transformers has no model_type {config.model_type}")
        if not has_class(config.architectures):
            # Another class of the same type would run, and give something else than what the checkpoint is for.
            names = " or ".join(config.architectures)
            return Verdict(False, f"Transformers has model_type {config.model_type}, but no class {names}")
        return Verdict(True, f"Transformers has model_type {config.model_type}")

    def build(self, resolution: Resolution, build: BuildContext) -> nn.Module:
        """The wrapped module, parameters on meta.

        Raises:
            BackendError: the rule that the model breaks, with the module that breaks it.
        """
        from modelbay_transformers.assemble import assemble
        from modelbay_transformers.classes import find_classes

        try:
            return assemble(find_classes(resolution), resolution, build)
        except ModelbayError:
            raise
        except Exception as error:
            raise BackendError(
                f"{resolution.architecture} raised {type(error).__name__} while it was built: {one_line(error)}"
            ) from error

    def media_processor(self, resolution: Resolution, tokenizer: Any) -> MediaProcessor | None:
        """The model's own processor, with this tokenizer; None for a model that takes text alone."""
        from modelbay_transformers.processor import make_processor

        return make_processor(resolution, tokenizer)

    def supported(self) -> list[ArchSpec]:
        """The architectures of Transformers that were run and compared with it; see docs/supported_models.md."""
        from modelbay_transformers.supported import supported

        return supported()

    def dry_run(self, resolution: Resolution) -> None:
        from modelbay_runtime.build import build_model

        build_model(resolution)


def known_to_transformers(model_type: str) -> bool:
    """Whether Transformers has a base model for this model type (table of names; no torch)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def has_class(names: Iterable[str]) -> bool:
    """Whether Transformers has a class of one of these names (table of names; no torch)."""
    import transformers

    return any(name in transformers.__all__ for name in names)  # dir() of the lazy module takes a third of a second
