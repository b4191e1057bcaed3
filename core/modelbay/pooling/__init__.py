"""How the hidden states of a model become a vector or scores: what the checkpoint says of it, and what was asked."""

from modelbay.pooling.modules import MODULES, SentenceModules, Stage, pooling_module, read_modules
from modelbay.pooling.spec import MODES, PoolingSpec, resolve_pooling

__all__ = [
    "MODES",
    "MODULES",
    "PoolingSpec",
    "SentenceModules",
    "Stage",
    "pooling_module",
    "read_modules",
    "resolve_pooling",
]
