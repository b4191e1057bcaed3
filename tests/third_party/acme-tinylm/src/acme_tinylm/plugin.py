"""What acme-tinylm adds to Modelbay. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import ArchSpec, ConfigClassSpec
from modelbay.weights.transforms import Rename


@hookimpl
def register_architectures() -> list[ArchSpec]:
    return [
        ArchSpec(
            name="AcmeForCausalLM",
            target="acme_tinylm.model:AcmeForCausalLM",
            model_types=("acme_tinylm",),
            transforms=(Rename(r"^tower\.", "model."),),
            examples=("acme/TinyLM-1B",),
        ),
        ArchSpec(name="LlamaForCausalLM", target="acme_tinylm.model:AcmeLlama", model_types=("llama",)),
    ]


@hookimpl
def register_config_classes() -> list[ConfigClassSpec]:
    return [ConfigClassSpec(model_type="acme_tinylm", target="acme_tinylm.config:AcmeConfig")]
