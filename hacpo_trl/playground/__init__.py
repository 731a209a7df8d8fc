"""Tiny language models and a verifiable arithmetic task that need neither a download nor a GPU."""

from .agents import (
    ANSWER_MARK,
    SHIPPED,
    SPECS,
    TASKS,
    AgentSpec,
    ShippedRecipe,
    accuracy,
    answer_reward,
    build_agent,
    make_dataset,
    make_problems,
    make_split,
    save_agent,
    shipped_agent,
    warm_up,
)

__all__ = [
    "ANSWER_MARK",
    "SHIPPED",
    "SPECS",
    "TASKS",
    "AgentSpec",
    "ShippedRecipe",
    "accuracy",
    "answer_reward",
    "build_agent",
    "make_dataset",
    "make_problems",
    "make_split",
    "save_agent",
    "shipped_agent",
    "warm_up",
]
