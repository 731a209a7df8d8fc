"""The agents, settings and methods of `compare_methods.py`. Everything that a run depends on stands here."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hacpo_trl.playground import AgentSpec

ADD_SUB = ("addition", "subtraction")
MULTIPLY = ("multiplication",)

PROMPTS, GENERATIONS = 16, 8  # of a round, for each agent
UPDATE_ROWS = 64  # sequences of an update: two updates on the own responses of a round, two on each peer's
LEARNING_RATE = 1e-4
ROUNDS = 16
LONG = 24  # rounds; longer settings have runs of their own of agents alone
HELD_OUT = 400
MEAN_OF = 4  # sampled responses to a held-out problem
MAX_TOKENS = 72


@dataclass(frozen=True)
class Recipe:
    """A starting agent: a tiny model after a supervised warm-up.

    Attributes:
        spec: architecture, size and tokenizer.
        target: the warm-up ends when this share of sampled responses to training problems of `skill` is right.
        skill: the tasks of `target`.
        practice: tasks of the warm-up's problems, each as often as it is named.
        task: problems that the agent is trained and measured on.
    """

    spec: AgentSpec
    target: float
    skill: tuple[str, ...] = ADD_SUB
    practice: tuple[str, ...] = ADD_SUB
    task: tuple[str, ...] = ADD_SUB


_OLMO = dict(architecture="olmo2", tokenizer="bpe", hidden_size=96, num_layers=2, num_heads=3, vocab_size=320)
_LLAMA = dict(architecture="llama", tokenizer="bpe", hidden_size=96, num_layers=3, num_heads=3, vocab_size=268)
_MULTI = dict(architecture="llama", tokenizer="bpe", vocab_size=275)
_MOSTLY_ADD = ("addition",) * 9 + ("subtraction",)
_MOSTLY_SUB = ("subtraction",) * 9 + ("addition",)

AGENTS: dict[str, Recipe] = {
    "olmo-early": Recipe(AgentSpec("olmo-early", **_OLMO, seed=2), 0.15),
    "olmo-late": Recipe(AgentSpec("olmo-late", **_OLMO, seed=2), 0.4),
    "llama": Recipe(AgentSpec("llama", **_LLAMA, seed=3), 0.4),
    "llama-add": Recipe(AgentSpec("llama-add", **_LLAMA, seed=4), 0.7, ("addition",), _MOSTLY_ADD),
    "olmo-sub": Recipe(AgentSpec("olmo-sub", **_OLMO, seed=5), 0.7, ("subtraction",), _MOSTLY_SUB),
    "llama-only-add": Recipe(AgentSpec("llama-only-add", **_LLAMA, seed=8), 0.7, ("addition",), ("addition",)),
    "olmo-only-sub": Recipe(AgentSpec("olmo-only-sub", **_OLMO, seed=9), 0.7, ("subtraction",), ("subtraction",)),
    "small": Recipe(
        AgentSpec("small", **_MULTI, hidden_size=64, num_layers=2, num_heads=2, seed=6),
        0.15,
        MULTIPLY,
        MULTIPLY,
        MULTIPLY,
    ),
    "large": Recipe(
        AgentSpec("large", **_MULTI, hidden_size=128, num_layers=3, num_heads=4, seed=7),
        0.4,
        MULTIPLY,
        MULTIPLY,
        MULTIPLY,
    ),
}
"""The starting agents by name."""

WARM_UP = {"chunk": 100, "longest": 3000, "batch_size": 64, "learning_rate": 3e-3}
"""Steps between two measurements of the target, the most steps, and `warm_up`'s settings."""


@dataclass(frozen=True)
class Setting:
    """A team and what it stands for.

    Attributes:
        agents: names in `AGENTS`.
        about: what the agents have in common and what not.
        rounds: length of its runs.
        without: arms that are left out, because they change nothing or to keep the whole within some hours.
        arms: the only ones that are run; empty for all.
    """

    agents: tuple[str, ...]
    about: str
    rounds: int = ROUNDS
    without: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()


UNTIL_FLAT = 80
"""Rounds after which GSPO alone has stopped rising."""
_LONG_ARMS = (
    *("gspo", "gspo-two-passes", "gspo-x2", "naive", "hacpo", "positive-wide"),
    *(
        "naive-merged",
        "hacpo-merged",
        "gap",
        "gap-merged",
        "gap-squared",
        "graft",
        "sgt",
        "xgrpo",
        "sapo",
        "luffy",
        "f-tis",
    ),
)

SETTINGS: dict[str, Setting] = {
    "state": Setting(
        ("olmo-early", "olmo-late"),
        "same model, different training",
        without=("shared-length", "shuffled", "wide"),
    ),
    "size": Setting(
        ("small", "large"),
        "same family and tokenizer, different size",
        without=("shared-length", "shuffled", "wide"),
    ),
    "model": Setting(("llama", "olmo-early"), "different architecture and tokenizer", without=("wide",)),
    "skill": Setting(("llama-add", "olmo-sub"), "each good where the other fails", rounds=24),
    "four": Setting(
        ("llama", "olmo-early", "llama-add", "olmo-sub"),
        "a team of four",
        without=(
            "own",
            "positive",
            "own-positive",
            "min-variance",
            "shared-length",
            "shuffled",
            "wide",
            "hacpo-double-rate",
        ),
    ),
    "apart": Setting(
        ("llama-only-add", "olmo-only-sub"),
        "each has never seen what the other can do",
        rounds=24,
        without=tuple("grpo no-baseline no-coefficient no-alpha no-tightening no-clip".split())
        + tuple("min-variance positive own-positive wide shuffled shared-length".split())
        + tuple("gspo-two-passes gspo-double-rate gspo-x2-double-rate hacpo-double-rate".split()),
    ),
    "model-long": Setting(
        ("llama", "olmo-early"),
        "different architecture and tokenizer, until GSPO is flat",
        rounds=UNTIL_FLAT,
        arms=_LONG_ARMS,
    ),
    "skill-long": Setting(
        ("llama-add", "olmo-sub"),
        "each good where the other fails, until GSPO is flat",
        rounds=UNTIL_FLAT,
        arms=_LONG_ARMS,
    ),
}


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        group: "method" (what the paper compares), "ablation" (the paper's), "candidate" (ours) or "control"
            (another learning rate or number of updates).
        about: what it is, in a few words.
        options: settings of `HACPOConfig` that differ from the common ones.
        alone: whether every agent trains by itself, so that its run serves every setting that it is part of.
        times: factor of responses and updates of a round.
        seeds: runs that a complete comparison needs.
        only: the settings that it is run in; all of them when empty.
    """

    group: str
    about: str
    options: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    times: int = 1
    seeds: int = 3
    only: tuple[str, ...] = ()


_LONG = ("model-long", "skill-long")

ARMS: dict[str, Arm] = {
    "gspo": Arm("method", "GSPO", {"method": "gspo"}, alone=True, seeds=5),
    "gspo-x2": Arm(
        "method", "GSPO, twice the responses and updates", {"method": "gspo"}, alone=True, times=2, seeds=5
    ),
    "grpo": Arm("method", "GRPO", {"method": "grpo"}, alone=True),
    "naive": Arm("method", "naive sharing", {"method": "naive"}, seeds=5),
    "hacpo": Arm("method", "HACPO, the paper's form", seeds=5),
    "no-baseline": Arm("ablation", "plain pool mean as baseline", {"baseline": "pooled"}),
    "no-coefficient": Arm("ablation", "no capability coefficient", {"capability_coefficient": False}),
    "no-alpha": Arm("ablation", "no exponential damping", {"alpha": 0.0}),
    "no-tightening": Arm("ablation", "no stepwise tightening", {"peer_clip_step": 0.0}),
    "no-clip": Arm("ablation", "no clip of peers' ratios", {"peer_clip_delta": None}),
    "min-variance": Arm("candidate", "minimum-variance baseline", {"baseline": "min_variance"}),
    "own": Arm("candidate", "own baseline", {"baseline": "own"}),
    "positive": Arm("candidate", "peers' successes only", {"peer_advantages": "positive"}),
    "own-positive": Arm(
        "candidate", "own baseline, peers' successes only", {"baseline": "own", "peer_advantages": "positive"}
    ),
    "own-positive-wide": Arm(
        "candidate",
        "own baseline, peers' successes only, delta 0.6",
        {"baseline": "own", "peer_advantages": "positive", "peer_clip_delta": 0.6},
        seeds=5,
    ),
    "positive-wide": Arm(
        "candidate",
        "peers' successes only, delta 0.6",
        {"peer_advantages": "positive", "peer_clip_delta": 0.6},
        seeds=5,
    ),
    "wide": Arm("candidate", "delta 0.6", {"peer_clip_delta": 0.6}),
    "shuffled": Arm("candidate", "own and peers' responses mixed", {"rollout_order": "shuffled"}),
    "shared-length": Arm("candidate", "shared length", {"length_normalization": "shared"}),
    "gspo-two-passes": Arm(
        "control",
        "GSPO, two passes over its responses: the updates of HACPO in a pair",
        {"method": "gspo", "num_iterations": 2},
        alone=True,
    ),
    "gspo-double-rate": Arm(
        "control",
        "GSPO at twice the learning rate",
        {"method": "gspo", "learning_rate": LEARNING_RATE * 2},
        alone=True,
    ),
    "gspo-x2-double-rate": Arm(
        "control",
        "GSPO x2 at twice the learning rate",
        {"method": "gspo", "learning_rate": LEARNING_RATE * 2},
        alone=True,
        times=2,
    ),
    "hacpo-double-rate": Arm("control", "HACPO at twice the learning rate", {"learning_rate": LEARNING_RATE * 2}),
    "gspo-half-rate": Arm(
        "control",
        "GSPO at half the learning rate",
        {"method": "gspo", "learning_rate": LEARNING_RATE / 2},
        alone=True,
        only=("four",),
    ),
    "gspo-x2-half-rate": Arm(
        "control",
        "GSPO x2 at half the learning rate",
        {"method": "gspo", "learning_rate": LEARNING_RATE / 2},
        alone=True,
        times=2,
        only=("four",),
    ),
    "hacpo-half-rate": Arm(
        "control", "HACPO at half the learning rate", {"learning_rate": LEARNING_RATE / 2}, only=("four",)
    ),
    "own-positive-wide-half-rate": Arm(
        "control",
        "own-positive-wide at half the learning rate",
        {
            "baseline": "own",
            "peer_advantages": "positive",
            "peer_clip_delta": 0.6,
            "learning_rate": LEARNING_RATE / 2,
        },
        only=("four",),
    ),
    "naive-merged": Arm(
        "candidate",
        "naive sharing, own and peers' responses in the same updates",
        {"method": "naive", "rollout_order": "merged"},
        only=_LONG,
    ),
    "hacpo-merged": Arm(
        "candidate", "HACPO, own and peers' responses in the same updates", {"rollout_order": "merged"}, only=_LONG
    ),
    "gap": Arm("candidate", "gap sharing", {"method": "gap", "method_settings": {"power": 1.0}}, only=_LONG),
    "gap-merged": Arm(
        "candidate",
        "gap sharing, own and peers' responses in the same updates",
        {"method": "gap", "method_settings": {"power": 1.0}, "rollout_order": "merged"},
        only=_LONG,
    ),
    "gap-squared": Arm(
        "candidate", "gap sharing, the gap squared", {"method": "gap", "method_settings": {"power": 2.0}}, only=_LONG
    ),
    "graft": Arm("method", "GRAFT", {"method": "graft"}, only=_LONG),
    "sgt": Arm("method", "SGT", {"method": "sgt"}, only=_LONG),
    "xgrpo": Arm("method", "XGRPO (our reading)", {"method": "xgrpo"}, only=_LONG),
    "sapo": Arm("method", "SAPO", {"method": "sapo"}, only=_LONG),
    "luffy": Arm("method", "LUFFY", {"method": "luffy"}, only=_LONG),
    "f-tis": Arm("method", "F-TIS (sequence form)", {"method": "f_tis"}, only=_LONG),
}

PAPER = {
    "method": "hacpo",
    "method_settings": None,
    "baseline": "capability",
    "peer_advantages": "all",
    "length_normalization": "own",
    "rollout_order": "own_first",
    "peer_clip_delta": 0.2,
    "peer_clip_step": 0.025,
    "alpha": 1.0,
}
"""The paper's form, set explicitly: the arms must not change when a default does."""


def options_of(arm: str) -> dict[str, Any]:
    """All settings of a run that make its method."""
    entry = ARMS[arm]
    paper = PAPER if entry.options.get("method", "hacpo") == "hacpo" else {}
    return {
        **paper,
        "num_generations": GENERATIONS * entry.times,
        "per_device_train_batch_size": UPDATE_ROWS,
        "steps_per_generation": PROMPTS * GENERATIONS * entry.times // UPDATE_ROWS,
        "learning_rate": LEARNING_RATE,
        "beta": 0.0,
        "max_completion_length": MAX_TOKENS,
        **entry.options,
    }


def arms_of(setting: str) -> list[str]:
    """The arms that are run in a setting."""
    entry = SETTINGS[setting]
    return [
        name
        for name, arm in ARMS.items()
        if name not in entry.without
        and (not arm.only or setting in arm.only)
        and (not entry.arms or name in entry.arms)
    ]


def rounds_of(setting: str, agents: tuple[str, ...]) -> int:
    """Rounds of a run: the setting's. An agent alone runs for the longest of the usual settings that it is part of."""
    rounds = SETTINGS[setting].rounds
    if agents == SETTINGS[setting].agents or rounds > LONG:
        return rounds
    return max(e.rounds for e in SETTINGS.values() if agents[0] in e.agents and e.rounds <= LONG)


def task_of(agents: tuple[str, ...]) -> tuple[str, ...]:
    """The problems that a team is trained and measured on."""
    (task,) = {AGENTS[name].task for name in agents}
    return task


def agent_fingerprint(name: str) -> str:
    """A checksum of all that a starting agent depends on."""
    return _checksum(asdict(AGENTS[name]), WARM_UP)


def run_fingerprint(agents: tuple[str, ...], arm: str, rounds: int) -> str:
    """A checksum of all that a run depends on but the seed: results of other settings are not taken for its own."""
    return _checksum([agent_fingerprint(name) for name in agents], options_of(arm), rounds, HELD_OUT, MEAN_OF)


def _checksum(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def run_file(folder: Path, setting: str, agents: tuple[str, ...], arm: str, seed: int) -> Path:
    """Where the result of a run stands. Settings share the runs of an agent alone."""
    alone = agents != SETTINGS[setting].agents
    name = f"alone-{agents[0]}-{rounds_of(setting, agents)}" if alone else setting
    return folder / "runs" / name / f"{arm}-{seed}.json"
