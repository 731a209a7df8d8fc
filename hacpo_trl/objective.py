"""HACPO's equations as pure tensor functions, and what other methods share with them. Needs only torch.

Source: "Heterogeneous Agent Collaborative Reinforcement Learning", arXiv 2603.02604. The equation numbers below are
the paper's. Shapes: N agents, B prompts, G responses of every agent to every prompt, R rows of a batch, T tokens.

| equation | what it is | function |
|---|---|---|
| section 3 | capability P, a windowed rate | `capability.CapabilityTracker` |
| (5) | ratio of capabilities, w(k, j) = P_k / P_j | `capability_ratios` |
| (5) | baseline mu of a learner | `learner_baselines` |
| (6) | advantage | `capability_aware_advantages` |
| - | discrepancy coefficient c(k <- j) = P_j / P_k | `capability_coefficients` |
| (56)-(59) | importance ratio s of two tokenizations | `sequence_log_ratio` |
| (56)-(59) | lower end of the peers' clip range | `peer_clip_lower` |
| (56)-(59) | objective of own and of peers' responses | `hacpo_objective`, `in_range` |
| - | the loss of an update with its sums, KL and entropy | `policy_loss`, `k3_divergence` |
| GRPO | advantage within one agent's group | `group_advantages` |
| PPO | clipped objective of every token | `clipped_objective` |

Naive sharing is (5)-(6) with w = 1 (`baseline="pooled"`) and the own formula for all (`is_own` true everywhere).
"""

import torch
from torch import Tensor

BASELINES = ("capability", "pooled", "min_variance", "own")

# A source's reward variance is floored at that of a Bernoulli variable with P = 0.02 (or 0.98): a source that was
# right on every prompt of a few rounds would otherwise get all the weight of the minimum-variance baseline.
_MIN_RATE = 0.02


def capability_ratios(capabilities: Tensor, ratio_bounds: tuple[float, float] = (0.1, 10.0)) -> Tensor:
    """Capability ratios w(k, j) = P_k / P_j of eq. (5), clamped.

    Args:
        capabilities: (N,) capability P of every agent.
        ratio_bounds: smallest and largest ratio.

    Returns:
        (N learners, N sources). 1 where either capability is not a positive finite number: such a ratio has no
        meaning, and 1 leaves the rewards as they are.
    """
    low, high = ratio_bounds
    if not 0 < low <= 1 <= high:
        raise ValueError(f"ratio_bounds={tuple(ratio_bounds)} must hold 1: 0 < low <= 1 <= high, e.g. (0.1, 10.0).")
    usable = torch.isfinite(capabilities) & (capabilities > 0)
    safe = torch.where(usable, capabilities, torch.ones_like(capabilities))
    ratios = (safe[:, None] / safe[None, :]).clamp(low, high)
    return torch.where(usable[:, None] & usable[None, :], ratios, torch.ones_like(ratios))


def capability_coefficients(capabilities: Tensor, ratio_bounds: tuple[float, float] = (0.1, 10.0)) -> Tensor:
    """Capability discrepancy coefficients c(k <- j) = P_j / P_k, which scale what a peer's response teaches.

    Args:
        capabilities: (N,) capability P of every agent.
        ratio_bounds: smallest and largest w(k, j) = 1 / c(k <- j).

    Returns:
        (N learners, N sources), 1 where a capability is not a positive finite number.
    """
    return 1.0 / capability_ratios(capabilities, ratio_bounds)


def learner_baselines(
    rewards: Tensor,
    capabilities: Tensor,
    *,
    ratio_bounds: tuple[float, float] = (0.1, 10.0),
    baseline: str = "capability",
    max_reward: float = 1.0,
    reward_variances: Tensor | None = None,
) -> Tensor:
    """Baseline mu of every learner and prompt, eq. (5).

    - ``"capability"``: the mean of w(k, j) * r[j, b, g] over j and g (the paper),
    - ``"pooled"``: the same with w = 1 (the paper's ablation, and naive sharing),
    - ``"min_variance"``: sum_j lambda[k, j] * w(k, j) * mean_g r[j, b, g] with lambda proportional to
      1 / (w(k, j)^2 v_j) and v_j the reward variance of source j,
    - ``"own"``: the learner's own mean of the prompt.

    Guard: a baseline above `max_reward` is replaced by the learner's own mean. A learner without a scorable response
    to the prompt has no own mean: "own" then takes the baseline "capability", and the guard takes `max_reward`.

    Args:
        rewards: (N, B, G). A reward that is not finite (NaN: unscorable) is left out.
        capabilities: (N,), see `CapabilityTracker`.
        ratio_bounds: clamp of w.
        baseline: one of `BASELINES`.
        max_reward: the largest reward a response can have; infinity switches the guard off.
        reward_variances: (N,) variance of each source's rewards, used by "min_variance" for rewards other than 0 and
            `max_reward`; by default the variance within `rewards`.

    Returns:
        (N, B), NaN for a prompt without any scorable response.

    Raises:
        ValueError: for wrong shapes or an unknown baseline.
    """
    if rewards.dim() != 3:
        raise ValueError(f"rewards must have the shape (agents, prompts, generations), got {tuple(rewards.shape)}.")
    if capabilities.shape != rewards.shape[:1]:
        raise ValueError(
            f"capabilities must hold one number for each of the {rewards.shape[0]} agents, "
            f"got the shape {tuple(capabilities.shape)}."
        )
    if baseline not in BASELINES:
        raise ValueError(f"baseline={baseline!r} is unknown; use one of {', '.join(BASELINES)}.")

    rewards, scorable, raw = _scorable(rewards)  # each (N, B, G)
    count = scorable.sum(-1)  # (N, B)
    total = raw.sum(-1)  # (N, B)
    own_mean = total / count  # (N, B), NaN where the agent has no scorable response

    pool_count = count.sum(0)  # (B,)
    ratios = capability_ratios(capabilities.to(rewards), ratio_bounds)  # (N, N)
    if baseline == "pooled":
        ratios = torch.ones_like(ratios)
    mu = (ratios @ total) / pool_count  # (N, B)
    if baseline == "min_variance":
        variances = _source_variances(raw, scorable, capabilities.to(rewards), max_reward, reward_variances)
        weights = 1.0 / (ratios.square() * variances)  # (N, N)
        present = (count > 0).to(rewards)  # a source without a scorable response leaves the weighted mean
        mu = ((weights * ratios) @ torch.nan_to_num(own_mean)) / (weights @ present)
    elif baseline == "own":
        mu = torch.where(count > 0, own_mean, mu)
    fallback = torch.where(count > 0, own_mean, torch.full_like(own_mean, max_reward))
    return torch.where(mu > max_reward, fallback, mu)


def capability_aware_advantages(
    rewards: Tensor,
    capabilities: Tensor,
    *,
    epsilon: float = 1e-6,
    ratio_bounds: tuple[float, float] = (0.1, 10.0),
    baseline: str = "capability",
    max_reward: float = 1.0,
    reward_variances: Tensor | None = None,
) -> Tensor:
    """Advantage of every response for every learner, eq. (5)-(6).

        A[k, j, b, g] = (r[j, b, g] - mu[k, b]) / (sigma[b] + epsilon)

    with sigma the standard deviation (correction 1) over all N * G raw rewards of the prompt and mu the learner's
    baseline, see `learner_baselines`.

    Guard: a prompt whose rewards are all equal has advantage 0 (the weights must not invent a signal). With N = 1
    every baseline is the group mean, and this is the advantage of GRPO and GSPO.

    Args:
        rewards: (N, B, G). A reward that is not finite (NaN: unscorable) leaves baseline and spread.
        capabilities: (N,), see `CapabilityTracker`.
        epsilon: added to the standard deviation.
        ratio_bounds: see `learner_baselines`, as the next three.
        baseline: one of `BASELINES`.
        max_reward: the largest reward a response can have.
        reward_variances: (N,) variance of each source's rewards.

    Returns:
        (N learners, N sources, B, G); 0 for unscorable responses.

    Raises:
        ValueError: for wrong shapes or an unknown baseline.
    """
    mu = learner_baselines(
        rewards,
        capabilities,
        ratio_bounds=ratio_bounds,
        baseline=baseline,
        max_reward=max_reward,
        reward_variances=reward_variances,
    )
    rewards, scorable, raw = _scorable(rewards)  # each (N, B, G)
    _, sigma = _deviations(raw, scorable, (0, 2))  # (1, B, 1)
    advantages = (raw[None] - mu[:, None, :, None]) / (sigma[None] + epsilon)
    informative = rewards_differ(rewards, (0, 2))[None] & scorable[None]
    return torch.where(informative, advantages, torch.zeros_like(advantages))


def group_advantages(rewards: Tensor, *, epsilon: float = 1e-6, scale: bool = True) -> Tensor:
    """Advantage of every response within the group of its own writer, as in GRPO.

        A[j, b, g] = (r[j, b, g] - mean_g r[j, b]) / (std_g r[j, b] + epsilon)

    Args:
        rewards: (N, B, G). A reward that is not finite (NaN: unscorable) leaves mean and spread.
        epsilon: added to the standard deviation (correction 1).
        scale: divide by the standard deviation.

    Returns:
        (N, B, G); 0 for unscorable responses, and where all rewards of a group are equal.
    """
    rewards, scorable, raw = _scorable(rewards)  # each (N, B, G)
    deviations, sigma = _deviations(raw, scorable, (2,))  # (N, B, G), (N, B, 1)
    advantages = deviations / (sigma + epsilon) if scale else deviations
    return torch.where(rewards_differ(rewards, (2,)) & scorable, advantages, torch.zeros_like(raw))


def is_right(rewards: Tensor) -> Tensor:
    """Whether a response earned something: a finite reward above 0. Any shape."""
    return torch.isfinite(rewards) & (rewards > 0)


def rewards_differ(rewards: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Whether there are unlike rewards among those that are finite.

    Args:
        rewards: any shape.
        dims: what belongs together: (2,) for the groups of (N, B, G), (0, 2) for the pool of every prompt.

    Returns:
        bool, with size 1 in `dims`; False where no reward or only one is finite.
    """
    known = torch.isfinite(rewards)
    highest = rewards.masked_fill(~known, -torch.inf).amax(dims, keepdim=True)
    return highest > rewards.masked_fill(~known, torch.inf).amin(dims, keepdim=True)


def _deviations(raw: Tensor, scorable: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Distances of scorable rewards from their mean over some dimensions, and their standard deviation."""
    count = scorable.sum(dims, keepdim=True)
    deviations = torch.where(scorable, raw - raw.sum(dims, keepdim=True) / count, torch.zeros_like(raw))
    return deviations, (deviations.square().sum(dims, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def _scorable(rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards as floating point numbers, which of them are finite, and the rewards with 0 for those that are not."""
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    scorable = torch.isfinite(rewards)
    return rewards, scorable, torch.where(scorable, rewards, torch.zeros_like(rewards))


def _source_variances(
    raw: Tensor, scorable: Tensor, capabilities: Tensor, max_reward: float, reward_variances: Tensor | None
) -> Tensor:
    """Reward variance v_j of every source, (N,): P (1 - P) for rewards 0 and `max_reward`, else as measured."""
    largest = max_reward if 0 < max_reward < torch.inf else raw.abs().max().clamp(min=1e-6).item()
    scale = largest**2
    binary = bool((~scorable | (raw == 0) | (raw == max_reward)).all())
    rate_known = bool((torch.isfinite(capabilities) & (capabilities >= 0) & (capabilities <= 1)).all())
    if binary and rate_known:
        rate = capabilities.clamp(_MIN_RATE, 1 - _MIN_RATE)
        return rate * (1 - rate) * scale
    if reward_variances is None:
        count = scorable.sum((1, 2)).clamp(min=1)
        mean = raw.sum((1, 2)) / count
        deviations = torch.where(scorable, raw - mean[:, None, None], torch.zeros_like(raw))
        reward_variances = deviations.square().sum((1, 2)) / count
    return torch.nan_to_num(reward_variances.to(raw)).clamp(min=_MIN_RATE * (1 - _MIN_RATE) * scale)


def sequence_log_ratio(logps: Tensor, mask: Tensor, source_mean_logp: Tensor, max_abs: float = 10.0) -> Tensor:
    """Logarithm of the sequence-level importance ratio s, part of eq. (56)-(59).

        log s = mean_t log pi_k(y_t | q) - mean_t log pi_j_old(y_t | q)

    The first mean runs over the learner's own tokens of the text, the second over the source's.

    Args:
        logps: (R, T) log-probabilities of the learner. What stands outside the mask may be anything, even NaN.
        mask: (R, T) 1 for tokens of the response.
        source_mean_logp: (R,) the source's mean log-probability when it sampled.
        max_abs: clamp of the result; beyond it the gradient is zero.

    Returns:
        (R,). A row without a token counts as a learner's mean of 0.
    """
    mean_logp = summed_logps(logps, mask) / mask.bool().sum(-1).clamp(min=1)
    return (mean_logp - source_mean_logp).clamp(-max_abs, max_abs)


def summed_logps(logps: Tensor, mask: Tensor) -> Tensor:
    """(R,) log-probability of every response, from (R, T) of its tokens. What stands outside the mask may be NaN."""
    return torch.where(mask.bool(), logps, torch.zeros_like(logps)).sum(-1)


def in_range(
    ratio: Tensor,
    advantages: Tensor,
    is_own: Tensor,
    own_range: tuple[float, float],
    peer_range: tuple[float, float],
    slack: float = 0.0,
) -> Tensor:
    """Whether the clip leaves a response its gradient in `hacpo_objective`.

    Own responses lose it below the range with a negative advantage and above it with a positive one, peers' outside
    of the range whatever the sign.

    Args:
        ratio: (R,) importance ratio s.
        advantages: (R,).
        is_own: (R,) whether the own formula applies.
        own_range: lowest and highest unclipped ratio of own responses.
        peer_range: the same of peers' responses.
        slack: how far outside still counts as inside.

    Returns:
        (R,) bool.
    """
    below = ratio < torch.where(is_own, own_range[0], peer_range[0]) - slack
    above = ratio > torch.where(is_own, own_range[1], peer_range[1]) + slack
    return ~torch.where(is_own, (below & (advantages < 0)) | (above & (advantages > 0)), below | above)


def sampler_correction(
    logps: Tensor, sampled_logps: Tensor, mode: str, low: float | None = None, high: float | None = None
) -> Tensor:
    """Truncated or masked importance weights of one response, between the weights that sampled and those that train.

    Args:
        logps: (T,) log-probabilities under the training weights when the response was sampled.
        sampled_logps: (T,) what the sampler reported; a NaN leaves its token without a correction.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask": weights of tokens or of the whole
            response, held within the bounds or set to 0 outside of them.
        low: smallest weight, or None.
        high: largest weight, or None.

    Returns:
        (T,), the same number for all tokens in the modes of sequences.
    """
    difference = torch.nan_to_num(logps - sampled_logps, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum().expand_as(difference)
    weights = difference.exp()
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    if mode.endswith("truncate"):
        return weights.clamp(low, high)
    return torch.where((weights < low) | (weights > high), torch.zeros_like(weights), weights)


def peer_clip_lower(update_index: int, delta: float = 0.2, delta_step: float = 0.025) -> float:
    """Lower end of the peer's clip range, part of eq. (56)-(59): min(1, 1 - delta + m * delta_step), in [0, 1].

    Args:
        update_index: m, the learner's optimizer updates already made in this round, from 0.
        delta: width of the range at the first update, in [0, 1].
        delta_step: by how much every update narrows it; at m = delta / delta_step the range is the point 1.
    """
    if update_index < 0:
        raise ValueError(f"update_index={update_index} must be at least 0: the first update of a round has index 0.")
    if not 0 <= delta <= 1:
        raise ValueError(f"delta={delta} must lie in [0, 1]; the paper's value is 0.2.")
    if not delta_step >= 0:
        raise ValueError(f"delta_step={delta_step} must not be negative; the paper's value is 0.025, 0 is off.")
    return min(1.0, max(0.0, 1.0 - delta + update_index * delta_step))


def hacpo_objective(
    ratio: Tensor,
    advantages: Tensor,
    is_own: Tensor,
    coefficient: Tensor,
    update_index: int,
    *,
    epsilon_low: float = 3e-4,
    epsilon_high: float = 4e-4,
    delta: float | None = 0.2,
    delta_step: float = 0.025,
    alpha: float = 1.0,
) -> Tensor:
    """Objective J of every sequence, eq. (56)-(59); the loss is minus its mean.

        own response:    J = min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A)
        peer's response: sbar = clip(s, lower_m, 1);  J = sbar * sg(sbar)^alpha * c * A

    sg is the stop-gradient: the factor scales, it is not differentiated. A peer's response outside [lower_m, 1] has
    zero gradient.

    Args:
        ratio: (R,) importance ratio s, differentiable.
        advantages: (R,) advantage A of each response for this learner.
        is_own: (R,) bool, True for the learner's own responses.
        coefficient: (R,) capability discrepancy coefficient c(k <- j) = P_j / P_k; ignored for own responses.
        update_index: m, see `peer_clip_lower`.
        epsilon_low: clip range below 1 of own responses.
        epsilon_high: clip range above 1 of own responses.
        delta: see `peer_clip_lower`; None leaves the peers' ratios unclipped (the paper's last ablation).
        delta_step: see `peer_clip_lower`.
        alpha: exponent of the damping factor, at least 0 (0: no damping).

    Returns:
        (R,).
    """
    if alpha < 0:
        raise ValueError(f"alpha={alpha} must not be negative; 0 switches the damping off.")
    own = torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    clipped = ratio if delta is None else ratio.clamp(peer_clip_lower(update_index, delta, delta_step), 1.0)
    coefficient = torch.where(is_own, torch.ones_like(coefficient), coefficient)  # NaN there would reach the gradient
    peer = clipped * clipped.detach().pow(alpha) * coefficient * advantages
    return torch.where(is_own, own, peer)


def clipped_objective(log_ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float) -> Tensor:
    """PPO's clipped objective of every token: min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A).

    Args:
        log_ratio: (R, T) log rho, differentiable; rho compares the learner with itself before the round.
        advantages: (R,).
        epsilon_low: clip range below 1.
        epsilon_high: clip range above 1.

    Returns:
        (R, T).
    """
    ratio, advantages = torch.exp(log_ratio), advantages[:, None]
    return torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)


def token_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, max_abs: float = 10.0) -> Tensor:
    """(R, T) log rho of every token, 0 outside of the mask; what stands there may be NaN."""
    difference = torch.where(mask.bool(), logps - old_logps, torch.zeros_like(logps))
    return difference.clamp(-max_abs, max_abs)


def policy_loss(
    objective: Tensor,
    is_own: Tensor,
    denominators: tuple[float, float],
    rows: float,
    *,
    divergence: Tensor | None = None,
    beta: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Tensor:
    """Loss of one micro-batch; the micro-batches of an update add up to the update's loss.

        L = - sum_own J / D_own - sum_peers J / D_peers + beta sum_own KL / D - entropy_coef sum_own H / D

    Args:
        objective: (R,) J of every response.
        is_own: (R,) whether the learner wrote the response.
        denominators: D of own and of peers' responses, the same for all micro-batches of the update. In HACPO both
            are the number of the update's responses.
        rows: D of divergence and entropy.
        divergence: (R,) KL of every response from the reference, or None.
        beta: its weight.
        entropy: (R,) mean entropy of every response's tokens, or None.
        entropy_coef: its weight.

    Returns:
        A number.
    """
    own, peers = denominators
    if own == peers:
        loss = -objective.sum() / own
    else:
        loss = -(objective / torch.where(is_own, own, peers).to(objective)).sum()
    if divergence is not None:
        loss = loss + beta * (divergence * is_own).sum() / rows
    if entropy is not None:
        loss = loss - entropy_coef * (entropy * is_own).sum() / rows
    return loss


def k3_divergence(logps: Tensor, reference_logps: Tensor, mask: Tensor) -> Tensor:
    """Token mean of the k3 estimator of KL(pi_k || reference) of every sequence.

        k3 = exp(d) - d - 1  with  d = log reference - log pi_k

    Args:
        logps: (R, T) log-probabilities of the learner.
        reference_logps: (R, T) log-probabilities of the reference model.
        mask: (R, T) 1 for tokens of the response.

    Returns:
        (R,), 0 for a row without a token.
    """
    keep = mask.bool()
    difference = torch.where(keep, reference_logps - logps, torch.zeros_like(logps))
    return (torch.exp(difference) - difference - 1).sum(-1) / keep.sum(-1).clamp(min=1)
