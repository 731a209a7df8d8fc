"""What a method of sharing decides. Needs only torch.

A method is a frozen dataclass in a file of its own: its fields are its settings, its class attributes say what the
trainer has to prepare, and its functions are pure: tensors in, tensors out. The trainer and the agents never ask which
method runs. Shapes: N agents, B prompts, G responses of each agent to each prompt, R rows of a micro-batch, T tokens.
"""

import dataclasses
import difflib
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..objective import clipped_objective, in_range, is_right, rewards_differ, sequence_log_ratio, token_log_ratio


@dataclass(frozen=True)
class Pool:
    """The graded responses of a round, the same on all processes.

    Attributes:
        rewards: (N, B, G), NaN for unscorable responses.
        capabilities: (N,) windowed capability P of every agent, this round included.
        reward_variances: (N,) windowed variance of every agent's rewards, or None.
        ratio_bounds: clamp of the ratios of capabilities.
        epsilon: added to a standard deviation that rewards are divided by.
        max_reward: the largest reward that a response can have.
        generator: random numbers of this round, the same on all processes and after a resume.
    """

    rewards: Tensor
    capabilities: Tensor
    reward_variances: Tensor | None = None
    ratio_bounds: tuple[float, float] = (0.1, 10.0)
    epsilon: float = 1e-6
    max_reward: float = 1.0
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def right(self) -> Tensor:
        """(N, B, G) whether a response has a finite reward above 0."""
        return is_right(self.rewards)

    @property
    def mixed(self) -> Tensor:
        """(N, B) whether an agent's group of responses to a prompt has unlike rewards."""
        return rewards_differ(self.rewards, (2,)).squeeze(2)

    @property
    def own(self) -> Tensor:
        """(N learners, N sources, 1, 1) whether learner and source are one."""
        return torch.eye(len(self.rewards), dtype=torch.bool)[:, :, None, None]


class Signal(NamedTuple):
    """What every learner takes from the pool.

    Attributes:
        advantages: (N learners, N sources, B, G).
        weights: (N learners, N sources, B, G) fixed factor of a response's objective; not read for own responses by
            methods whose own formula has none.
        taken: (N learners, N sources, B, G) bool, whether the response is a row of the learner's updates. A row with
            advantage 0 stays in the denominators, one that is not taken does not.
    """

    advantages: Tensor
    weights: Tensor
    taken: Tensor


@dataclass
class Rows:
    """A micro-batch as the objective sees it.

    Attributes:
        logps: (R, T) log-probabilities of the learner, differentiable. Outside of the mask they may be anything.
        mask: (R, T) 1 for tokens of the response.
        source_logp: (R,) mean log-probability of the response when its writer sampled it, over the writer's tokens.
        old_logps: (R, T) log-probabilities of the learner before the round's first update; None for methods that do
            not compare with them.
        advantages: (R,).
        weights: (R,).
        is_own: (R,) whether the learner wrote the response.
        update_index: the learner's updates already made in this round.
        clip_range: `epsilon` and `epsilon_high`.
    """

    logps: Tensor
    mask: Tensor
    source_logp: Tensor
    old_logps: Tensor | None
    advantages: Tensor
    weights: Tensor
    is_own: Tensor
    update_index: int = 0
    clip_range: tuple[float, float] = (3e-4, 4e-4)

    @property
    def lengths(self) -> Tensor:
        """(R,) tokens of every response, at least 1."""
        return self.mask.sum(-1).clamp(min=1)

    @functools.cached_property
    def ratio(self) -> Tensor:
        """(R,) importance ratio of the whole response against its writer, before any clip."""
        return torch.exp(sequence_log_ratio(self.logps, self.mask, self.source_logp))

    @functools.cached_property
    def token_ratio(self) -> Tensor:
        """(R, T) log of the ratio of every token against the learner before the round, 0 outside of the mask."""
        return token_log_ratio(self.logps, self.old_logps, self.mask)

    def sum_tokens(self, values: Tensor) -> Tensor:
        """(R,) sum over the response of (R, T)."""
        return torch.where(self.mask.bool(), values, torch.zeros_like(values)).sum(-1)


class Clipped(NamedTuple):
    """What the clip does to a micro-batch.

    Attributes:
        below: (R,) whether the ratio is below the clip range; for ratios of tokens the share of them.
        above: (R,) the same above it.
        inside: (R,) bool, whether the clip leaves the response a gradient.
    """

    below: Tensor
    above: Tensor
    inside: Tensor


class Counts(NamedTuple):
    """What an update holds, on average over the processes.

    Attributes:
        rows: responses that an update of this agent stands for; fixed for the run.
        tokens: tokens of the responses that are rows of the update.
        peers: peers' responses among them that teach.
        longest: `max_completion_length`.
    """

    rows: float
    tokens: float
    peers: float
    longest: int


Order = str
"""own_first: updates on own responses, then as many on each peer's. shuffled: as many updates, of all responses mixed.
merged: as many updates as without peers, of all responses mixed. with_prompt: the same, peers' responses in the update
that holds their prompt. peers_last: as many updates as without peers, peers' responses in the last of them."""

SEVERAL = ("own_first", "shuffled")
"""The orders in which updates grow with the number of agents."""


@dataclass(frozen=True)
class Method:
    """A method of sharing; subclasses are its settings and its equations.

    Class attributes:
        name: as in `HACPOConfig(method=...)`.
        title: for people.
        about: a sentence for model cards and docs.
        papers: names of the papers it comes from, see `methods.PAPERS`.
        trains_on_peers: whether peers' responses can be rows of the updates. Without, the loss is TRL's.
        pools_rewards: whether peers' rewards act on the advantages.
        compares_with_old: whether the objective needs `Rows.old_logps` of own responses. Costs a pass without gradient
            over them.
        views_peers: the same for peers' responses: the learner's log-probabilities of them before the round's first
            update, by which `admit` weighs them. Costs a pass of the learner and one of the writer.
        selects: whether only some of the peers' responses are taken.
        order: one of `Order`; None: the setting `rollout_order`.
        counts_tokens: whether `denominators` needs tokens or peers of an update.
        level: TRL's importance_sampling_level, which evaluations use.
        clip_range: `epsilon` and `epsilon_high` by default.
        beta: weight of the KL divergence by default.
        config_fields: field of the method -> field of HACPOConfig that it is read from; others are `method_settings`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    papers: ClassVar[tuple[str, ...]] = ()
    trains_on_peers: ClassVar[bool] = True
    pools_rewards: ClassVar[bool] = True
    compares_with_old: ClassVar[bool] = False
    views_peers: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    order: ClassVar[Order | None] = None
    counts_tokens: ClassVar[bool] = False
    level: ClassVar[str] = "sequence"
    clip_range: ClassVar[tuple[float, float]] = (3e-4, 4e-4)
    beta: ClassVar[float] = 0.001
    config_fields: ClassVar[dict[str, str]] = {}

    def signal(self, pool: Pool) -> Signal:
        """What every learner takes from the pool, and how much it counts. Pure, and the same on all processes."""
        raise NotImplementedError

    def admit(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Weight of peers' responses by the learner's view of them, before the round's first update.

        Args:
            ratio: (R,) importance ratio s of the learner against the writer.
            advantages: (R,).

        Returns:
            (R,) factor of the weight; 0 takes the response out of the updates.
        """
        return torch.ones_like(ratio)

    def objective(self, rows: Rows) -> Tensor:
        """(R,) what the update raises, before the division by `denominators`."""
        raise NotImplementedError

    def clipped(self, rows: Rows, slack: float = 0.0) -> Clipped:
        """What the clip does to every response; `slack`: how far outside still counts as inside."""
        raise NotImplementedError

    def denominators(self, counts: Counts) -> tuple[float, float]:
        """What the objectives of own and of peers' responses are divided by."""
        return counts.rows, counts.rows

    def can_clip_peers(self) -> bool:
        """Whether `clipped` can take a peer's response its gradient: else nobody has to look for such ones."""
        return True

    def scales_peers(self) -> bool:
        """Whether a peer's weight follows the ratio of capabilities."""
        return False

    @classmethod
    def from_settings(cls, settings: dict[str, Any], config: Any) -> "Method":
        """Builds the method.

        Args:
            settings: by name, of those fields that are not read from the config.
            config: a `HACPOConfig`.

        Raises:
            ValueError: for unknown settings, and for values that cannot work.
        """
        known = [f.name for f in dataclasses.fields(cls) if f.name not in cls.config_fields]
        for name in settings:
            if name in cls.config_fields:
                raise ValueError(
                    f"method_settings sets {name!r}, which is a setting of its own: {cls.config_fields[name]}."
                )
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise ValueError(f"method_settings sets {name!r}, which {cls.name!r} does not have; {has}.{hint}")
        taken = {name: getattr(config, source) for name, source in cls.config_fields.items()}
        return cls(**settings, **taken)


class SequenceClip:
    """Mixin of methods whose ratio is one number a response, with clip ranges of their own for own and peers'."""

    def ranges(self, rows: Rows) -> tuple[tuple[float, float], tuple[float, float]]:
        """Lowest and highest unclipped ratio of own and of peers' responses."""
        raise NotImplementedError

    def own_formula(self, rows: Rows) -> Tensor:
        """(R,) bool, for which responses the own formula holds."""
        return rows.is_own

    def clipped(self, rows: Rows, slack: float = 0.0) -> Clipped:
        """See `Method.clipped`."""
        own_range, peer_range = self.ranges(rows)
        own, ratio = self.own_formula(rows), rows.ratio
        low, high = (torch.where(own, a, b) for a, b in zip(own_range, peer_range, strict=True))
        inside = in_range(ratio, rows.advantages, own, own_range, peer_range, slack)
        return Clipped(ratio < low, ratio > high, inside)


class TokenClip:
    """Mixin of methods with PPO's clip of every token's ratio against the learner before the round.

    Its defaults are GRPO's numbers without KL, and an objective that is a mean over the tokens of the update.
    """

    compares_with_old: ClassVar[bool] = True
    counts_tokens: ClassVar[bool] = True
    level: ClassVar[str] = "token"
    clip_range: ClassVar[tuple[float, float]] = (0.2, 0.2)
    beta: ClassVar[float] = 0.0

    def objective(self, rows: Rows) -> Tensor:
        """w * sum_t min(rho_t A, clip(rho_t) A); w = 1 for own responses."""
        weights = torch.where(rows.is_own, torch.ones_like(rows.weights), rows.weights)
        return weights * rows.sum_tokens(self.token_terms(rows))

    def denominators(self, counts: Counts) -> tuple[float, float]:
        """Tokens of the rows that the update holds."""
        return counts.tokens, counts.tokens

    def clips(self, rows: Rows) -> Tensor:
        """(R,) bool, to which responses the clip applies."""
        return torch.ones_like(rows.is_own)

    def token_terms(self, rows: Rows) -> Tensor:
        """(R, T) clipped objective of every token."""
        return clipped_objective(rows.token_ratio, rows.advantages, *rows.clip_range)

    def clipped(self, rows: Rows, slack: float = 0.0) -> Clipped:
        """See `Method.clipped`: shares of tokens, and whether one of them keeps its gradient."""
        low, high = rows.clip_range
        ratio, keep = torch.exp(rows.token_ratio), rows.mask.bool()
        may_clip = keep & self.clips(rows)[:, None]
        below, above = may_clip & (ratio < 1 - low - slack), may_clip & (ratio > 1 + high + slack)
        advantages = rows.advantages[:, None]
        held = (below & (advantages < 0)) | (above & (advantages > 0))
        return Clipped(below.sum(-1) / rows.lengths, above.sum(-1) / rows.lengths, (keep & ~held).any(-1))


def check(owner: Method, name: str, fine: bool, wanted: str) -> None:
    """Refuses a setting.

    Raises:
        ValueError: where it is not fine.
    """
    if not fine:
        raise ValueError(f"{owner.name}: {name}={getattr(owner, name)!r} must be {wanted}.")
