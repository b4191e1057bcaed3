"""The native backend: model classes that plugins register. Assessing is light; torch comes with building."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelbay.backends import Verdict
from modelbay.errors import BackendError, ModelbayError
from modelbay.specs import load_target

if TYPE_CHECKING:
    from modelbay.args import EngineArgs
    from modelbay.config import ModelConfig
    from modelbay.plugins import Plugins
    from modelbay.resolve import Resolution
    from modelbay.source import ModelFiles
    from modelbay.specs import ArchSpec
    from modelbay_runtime.api import BuildContext


class NativeBackend:
    """See `modelbay.backends.ModelingBackend`."""

    def assess(
        self, files: ModelFiles, config: ModelConfig, arch: ArchSpec | None, args: EngineArgs, plugins: Plugins
    ) -> Verdict:
        if arch is None:
            names = ", ".join(config.architectures) or "none named"
            return Verdict(False, f"no installed plugin registers this architecture ({names})")
        if config.per_layer:
            return Verdict(
                False, f"{', '.join(config.per_layer)} differ from layer to layer, which {arch.name} does not serve"
            )
        kinds = plugins.names("attention_kinds")
        unknown = sorted(set(config.layer_types) - set(kinds))
        if unknown:
            return Verdict(False, f"layers of kind {', '.join(unknown)}; installed attention kinds: {', '.join(kinds)}")
        beyond = sorted(set(config.layer_types) - set(arch.attention))
        if beyond:
            written_for = ", ".join(arch.attention)
            return Verdict(False, f"{arch.name} is written for {written_for} attention, not {', '.join(beyond)}")
        return Verdict(True, f"{arch.name} is registered", arch.target)

    def build(self, resolution: Resolution, build: BuildContext) -> Any:
        """The module with its parameters on meta.

        Raises:
            BackendError: the class raised; names it and the original error.
        """
        from modelbay_runtime.parallel.plan import check_plan, report_plan

        assert resolution.arch is not None, "assess() refuses a model without a native architecture"
        from modelbay_runtime.pooling.classifier import as_pooling_model

        model_class = load_target(resolution.arch.target)
        try:
            module = model_class(resolution.config, build)
        except ModelbayError:
            raise
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]  # after it torch lists its own frames
            raise BackendError(f"{resolution.arch.target} raised {type(error).__name__}: {first}") from error
        check_plan(module, resolution.arch)
        report_plan(module, resolution.arch, build.parallel.mesh, resolution.trace)
        owner = f"{resolution.owner}" if resolution.owner else "in-process"
        resolution.trace.decide("build", "model class", type(module).__qualname__, owner)
        return as_pooling_model(module, resolution, build)

    def media_processor(self, resolution: Resolution, tokenizer: Any) -> Any:
        """What the model class's own ``media_processor(resolution, tokenizer)`` makes, a
        `modelbay_runtime.multimodal.data.MediaProcessor`; None if it has none."""
        assert resolution.arch is not None, "assess() refuses a model without a native architecture"
        make = getattr(load_target(resolution.arch.target), "media_processor", None)
        return None if make is None else make(resolution, tokenizer)

    def dry_run(self, resolution: Resolution) -> None:
        from modelbay_runtime.build import build_model

        build_model(resolution)
