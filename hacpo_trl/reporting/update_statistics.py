"""Running statistics of a learner's updates, one row of sums per source, kept on the device until they are logged.

Needs torch and the equations only. Nothing here waits for the device but the read-out in `drain`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..methods import Clipped
from ..objective import summed_logps

_SUMS = (
    "count",  # responses that ran
    "silent",  # responses that did not run, having no gradient
    "ratio",
    "ratio_squared",
    "below",  # ratio below the clip range
    "above",  # ratio above it
    "no_gradient",  # ran without effect: no advantage, or outside the range
    "repelling",  # inside the range with a negative advantage: the learner is pushed away from it
    "low_clipped",  # own response held by the lower clip (its advantage is negative)
    "high_clipped",  # own response held by the upper clip (its advantage is positive)
    "kl",
    "entropy",  # sum over tokens
    "tokens",
)


class UpdateStatistics:
    """Sums over the responses that one learner was updated on, by source.

    Args:
        num_agents: N.
        learner: index of the learner.
        device: where the sums live.
    """

    def __init__(self, num_agents: int, learner: int, device: torch.device | str = "cpu"):
        self.learner = learner
        # Apple's GPUs have no float64
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        self.sums = torch.zeros(num_agents, len(_SUMS), dtype=dtype, device=device)
        self.ratio_max = torch.zeros(num_agents, dtype=dtype, device=device)
        # What a reader has not asked for yet: the log is written every few updates, a round ends at other times
        nothing = (torch.zeros_like(self.sums, device="cpu"), torch.zeros_like(self.ratio_max, device="cpu"))
        self._unread = {"log": nothing, "round": nothing}

    @torch.no_grad()
    def add(
        self,
        *,
        source: Tensor,
        ratio: Tensor,
        advantages: Tensor,
        clipped: Clipped,
        kl: Tensor | None,
        entropy: Tensor | None,
        mask: Tensor,
        filler: Tensor | None = None,
    ) -> Tensor:
        """Adds one micro-batch.

        Args:
            source: (R,) index of the agent that wrote each response.
            ratio: (R,) raw importance ratios, before any clipping.
            advantages: (R,).
            clipped: what the clip does to them.
            kl: (R,) divergence of own responses, or None.
            entropy: (R, T) entropy of every token's distribution, or None.
            mask: (R, T).
            filler: (R,) bool, responses that do not count, or None.

        Returns:
            (R,) bool, which of them have a gradient of the objective.
        """
        below, above, inside = clipped
        teaches = inside & (advantages != 0)
        zero = torch.zeros_like(ratio)
        columns = {
            "count": torch.ones_like(ratio),
            "silent": zero,
            "ratio": ratio,
            "ratio_squared": ratio.to(self.sums).square(),
            "below": below,
            "above": above,
            "no_gradient": ~teaches,
            "repelling": teaches & (advantages < 0),
            "low_clipped": below * (advantages < 0),
            "high_clipped": above * (advantages > 0),
            "kl": zero if kl is None else kl,
            "entropy": zero if entropy is None else summed_logps(entropy, mask),
            "tokens": mask.sum(-1),
        }
        rows = torch.stack([columns[name].to(self.sums) for name in _SUMS], dim=-1)  # (R, len(_SUMS))
        ratio = ratio.to(self.ratio_max)
        if filler is not None:
            rows = torch.where(filler[:, None], torch.zeros_like(rows), rows)
            ratio = torch.where(filler, torch.zeros_like(ratio), ratio)
        self.sums.index_add_(0, source, rows)
        self.ratio_max.scatter_reduce_(0, source, ratio, "amax")
        return teaches

    def add_silent(self, source: int, count: int) -> None:
        """Counts responses of a source that were not run because they have no gradient."""
        self.sums[source, _SUMS.index("silent")] += count

    def drain(
        self, reduce: Callable[[Tensor, str], Tensor] = lambda t, kind: t, reader: str = "log"
    ) -> list[dict[str, float]]:
        """Reads the statistics out and starts anew.

        Args:
            reduce: adds ("sum") or maximises ("max") a tensor over all processes; called in the same order on all.
            reader: "log" or "round": each gets everything since its own last call.

        Returns:
            One dict per source; empty for a source that has not been learned from.
        """
        sums = reduce(self.sums, "sum").cpu()
        maxima = reduce(self.ratio_max, "max").cpu()
        self.sums = torch.zeros_like(self.sums)
        self.ratio_max = torch.zeros_like(self.ratio_max)
        for other, (waiting, highest) in self._unread.items():
            self._unread[other] = (waiting + sums, torch.maximum(highest, maxima))
        sums, maxima = self._unread[reader]
        self._unread[reader] = (torch.zeros_like(sums), torch.zeros_like(maxima))
        result = []
        for source, (values, ratio_max) in enumerate(zip(sums.tolist(), maxima.tolist(), strict=True)):
            total = dict(zip(_SUMS, values, strict=True))
            count, seen = total["count"], total["count"] + total["silent"]
            stats: dict[str, float] = {}
            if count:
                stats["ratio_mean"] = total["ratio"] / count
                stats["ratio_max"] = ratio_max
                stats["effective_sample_size"] = total["ratio"] ** 2 / (count * total["ratio_squared"])
                if source == self.learner:
                    stats["clip_ratio/low_mean"] = total["low_clipped"] / count
                    stats["clip_ratio/high_mean"] = total["high_clipped"] / count
                    stats["clip_ratio/region_mean"] = (total["low_clipped"] + total["high_clipped"]) / count
                    stats["entropy"] = total["entropy"] / max(total["tokens"], 1.0)
                    stats["kl"] = total["kl"] / count
                else:
                    stats["below_range"] = total["below"] / count
                    stats["above_range"] = total["above"] / count
            if seen and source != self.learner:
                stats["repelling"] = total["repelling"] / seen
            if seen:
                stats["no_gradient"] = (total["no_gradient"] + total["silent"]) / seen
            result.append(stats)
        return result
