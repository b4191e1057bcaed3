"""How the hidden states of a model become a vector or scores: what the checkpoint says of it, and what was asked."""

from modelbay.pooling.modules import SentenceModules, Stage, read_modules, says_pooling
from modelbay.pooling.spec import MODES, PoolingSpec, resolve_pooling

__all__ = ["MODES", "PoolingSpec", "SentenceModules", "Stage", "read_modules", "resolve_pooling", "says_pooling"]
