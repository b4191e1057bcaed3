"""From config.json to `ModelConfig`: the frozen facts, each with its source (BEHAVIOUR C1-C11)."""

from modelbay.config.load import load_config
from modelbay.config.model_config import ModelConfig
from modelbay.config.plain import PlainConfig

__all__ = ["ModelConfig", "PlainConfig", "load_config"]
