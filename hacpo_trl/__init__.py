"""hacpo_trl: different language models learn together by HACPO (arXiv 2603.02604), on TRL's GRPOTrainer.

The names below are loaded when they are first used, so that the light parts (the rewards' worker processes, the
equations) do not wait for transformers.
"""

import importlib
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .capability import CapabilityTracker
    from .config import HACPOConfig
    from .maths.reward import MathVerifier, math_reward, number_reward
    from .objective import capability_aware_advantages, hacpo_objective, peer_clip_lower, sequence_log_ratio
    from .training.agent import HACPOAgent
    from .training.checkpoint import merge_adapter
    from .training.trainer import HACPOTrainer

_HOMES = {
    "HACPOAgent": "training.agent",
    "CapabilityTracker": "capability",
    "HACPOConfig": "config",
    "capability_aware_advantages": "objective",
    "hacpo_objective": "objective",
    "peer_clip_lower": "objective",
    "sequence_log_ratio": "objective",
    "math_reward": "maths.reward",
    "number_reward": "maths.reward",
    "MathVerifier": "maths.reward",
    "merge_adapter": "training.checkpoint",
    "HACPOTrainer": "training.trainer",
}

__all__ = [
    "CapabilityTracker",
    "HACPOAgent",
    "HACPOConfig",
    "HACPOTrainer",
    "MathVerifier",
    "__version__",
    "capability_aware_advantages",
    "hacpo_objective",
    "math_reward",
    "number_reward",
    "merge_adapter",
    "peer_clip_lower",
    "sequence_log_ratio",
]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
