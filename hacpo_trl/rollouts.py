"""Responses as rows of micro-batches: each learner's own and its peers', in the learner's tokens.

Needs torch only. R is the number of responses of one agent on this process. See texts.py for the exchange of texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .texts import EncodedResponses, ResponseTexts


@dataclass
class Rollout:
    """One agent's responses to the prompts of this process, all tensors on the CPU.

    Attributes:
        prompt_ids: R tensors (P_i,), the prompts in the agent's own template and tokens.
        completion_ids: R tensors (T_i,), the exact sampled tokens.
        texts: R responses as the reward functions read them, without special tokens and stop text.
        finished: R flags, True when the response ended itself, by an end token or a stop text.
        masked: R flags, True when `mask_truncated_completions` takes the response out of every loss.
        logp_sums: (R,) sum of the response's log-probabilities under the weights that sampled it; None when no other
            agent needs it.
        peer_logp_sums: (R,) what peers compare with, where it is not `logp_sums`.
        per_token: name -> R tensors (T_i,): what TRL computed for the own loss ("ref_per_token_logps",
            "old_per_token_logps", "importance_sampling_ratio").
        rewards: (B * G,) rewards of **all** processes, NaN for unscorable responses.
        for_peers: the responses as peers read them; None when nothing is shared.
    """

    prompt_ids: list[Tensor]
    completion_ids: list[Tensor]
    texts: list[str]
    finished: list[bool]
    masked: list[bool]
    logp_sums: Tensor | None
    per_token: dict[str, list[Tensor]]
    rewards: Tensor
    peer_logp_sums: Tensor | None = None
    for_peers: ResponseTexts | None = None

    def __len__(self) -> int:
        return len(self.texts)


@dataclass
class Row:
    """One response as one learner sees it.

    Attributes:
        source: index of the agent that wrote it.
        prompt_ids: (P,) in the learner's tokens.
        completion_ids: (T,) in the learner's tokens, T >= 1.
        advantage: its advantage for this learner.
        coefficient: capability discrepancy coefficient c(learner <- source).
        source_logp: mean log-probability that the ratio compares with.
        masked: True when the row must not act on any loss.
        per_token: see `Rollout.per_token`; empty for peers' responses.
        update: index of the update of a pass that the row belongs to, set by `plan_round`.
        filler: True for a row without advantage that only keeps a pass from being empty, set by `plan_round`; the
            statistics leave it out.
    """

    source: int
    prompt_ids: Tensor
    completion_ids: Tensor
    advantage: float = 0.0
    coefficient: float = 1.0
    source_logp: float = 0.0
    masked: bool = False
    per_token: dict[str, Tensor] = field(default_factory=dict)
    update: int = 0
    filler: bool = False

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def own_rows(rollout: Rollout, source: int, advantages: Tensor) -> list[Row]:
    """A learner's own responses, token by token as sampled.

    Args:
        rollout: the learner's own.
        source: the learner's index.
        advantages: (R,).
    """
    rows = []
    for i in range(len(rollout)):
        length = len(rollout.completion_ids[i])
        logp = 0.0 if rollout.logp_sums is None else rollout.logp_sums[i].item() / max(length, 1)
        rows.append(
            Row(
                source=source,
                prompt_ids=rollout.prompt_ids[i],
                completion_ids=rollout.completion_ids[i],
                advantage=advantages[i].item(),
                source_logp=logp,
                masked=rollout.masked[i],
                per_token={name: values[i] for name, values in rollout.per_token.items()},
            )
        )
    return rows


def peer_rows(
    rollout: Rollout,
    encoded: EncodedResponses,
    prompt_ids: Sequence[Tensor],
    source: int,
    advantages: Tensor,
    coefficient: float,
    *,
    pad_id: int,
    shared_length: bool = False,
    drop_overflowing: bool = False,
) -> list[Row]:
    """A peer's responses for a learner. What cannot be used keeps its row, with advantage 0.

    Args:
        rollout: the peer's.
        encoded: its texts in the learner's tokens.
        prompt_ids: R prompts in the learner's tokens.
        source: the peer's index.
        advantages: (R,) for this learner.
        coefficient: c(learner <- peer).
        pad_id: stands for a response without any token.
        shared_length: divide the peer's summed log-probability by the learner's token count instead of the peer's.
        drop_overflowing: give a response beyond the learner's limit no advantage instead of cutting it.
    """
    rows = []
    logp_sums = rollout.logp_sums if rollout.peer_logp_sums is None else rollout.peer_logp_sums
    for i in range(len(rollout)):
        own_length = max(len(rollout.completion_ids[i]), 1)
        length = max(encoded.lengths[i], 1) if shared_length else own_length
        empty = not encoded.ids[i]
        overflows = encoded.lengths[i] > len(encoded.ids[i])
        unusable = empty or rollout.masked[i] or encoded.unreadable[i] or (drop_overflowing and overflows)
        rows.append(
            Row(
                source=source,
                prompt_ids=prompt_ids[i],
                completion_ids=torch.tensor(encoded.ids[i] or [pad_id], dtype=torch.long),
                advantage=0.0 if unusable else advantages[i].item(),
                coefficient=coefficient,
                source_logp=logp_sums[i].item() / length,
                masked=empty,
            )
        )
    return rows


def plan_round(
    own: Sequence[Row],
    peers: Sequence[Row],
    *,
    rows_per_step: int,
    steps_per_update: int,
    iterations: int = 1,
    own_first: bool = True,
    skip_silent: bool = True,
    agree: Callable[[list[int]], list[int]] = lambda counts: counts,
) -> list[list[Row]]:
    """Orders a learner's rows of a round into micro-batches.

    The own responses come shuffled and first, then those of all peers, shuffled; or all are shuffled together. An
    update takes `steps_per_update` micro-batches of `rows_per_step` rows. Within an update the rows are sorted by
    length, so that little is padded. A peer's row without advantage has no gradient: with `skip_silent` such rows
    are left out, and the others make as few micro-batches as they need, the update's last ones (its first ones are
    empty lists).

    Args:
        own: R rows.
        peers: (N - 1) * R rows, or none.
        rows_per_step: rows of a micro-batch; R must be a multiple of rows_per_step * steps_per_update.
        steps_per_update: micro-batches of an update.
        iterations: passes over all rows.
        own_first: see above.
        skip_silent: see above.
        agree: takes the number of micro-batches that every update needs here and returns how many it needs on all
            processes (the maximum): all must run the same number of passes.

    Returns:
        Micro-batches in order; every `steps_per_update` of them make an update. An update has at least one with rows.
    """
    own = [own[i] for i in torch.randperm(len(own)).tolist()]
    # Drawing for peers must not move the random numbers of a lone agent: N = 1 equals TRL's GRPOTrainer
    rest = [peers[i] for i in torch.randperm(len(peers)).tolist()] if peers else []
    ordered = own + rest
    if rest and not own_first:
        ordered = [ordered[i] for i in torch.randperm(len(ordered)).tolist()]

    per_update = rows_per_step * steps_per_update
    updates = [ordered[i : i + per_update] for i in range(0, len(ordered), per_update)]
    for index, update in enumerate(updates):
        for row in update:
            row.update = index
    own_source = own[0].source if own else None

    def is_silent(row: Row) -> bool:
        return skip_silent and row.source != own_source and row.advantage == 0.0

    needed = agree([-(-sum(not is_silent(row) for row in update) // rows_per_step) for update in updates])
    plan: list[list[Row]] = []
    for update, steps in zip(updates, needed, strict=True):
        active = [row for row in update if not is_silent(row)]
        spare = [row for row in update if is_silent(row)]
        steps = max(steps, 1)
        fillers = spare[: max(steps - len(active), 0)]  # no pass may be empty
        for row in fillers:
            row.filler = True
        rows = active + fillers
        if steps_per_update > 1:
            rows.sort(key=len, reverse=True)
        bounds = [len(rows) * i // steps for i in range(steps + 1)]
        plan += [[] for _ in range(steps_per_update - steps)]
        plan += [rows[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    return plan * iterations


def collate(rows: Sequence[Row], *, learner: int, pad_id: int, device: torch.device | str = "cpu") -> dict:
    """A micro-batch, padded to its own longest prompt and response.

    Args:
        rows: R rows.
        learner: the learner's index.
        pad_id: fills the padding.
        device: where the tensors go.

    Returns:
        prompt_ids, prompt_mask (R, P) padded on the left; completion_ids, completion_mask (R, T) padded on the right;
        advantages, coefficient, source_logp, is_own, source (R,); and every entry of `Row.per_token` that a row has,
        (R, T), with zeros for rows without it (peers').
    """
    prompts = [row.prompt_ids for row in rows]
    completions = [row.completion_ids for row in rows]
    batch = {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_value=pad_id, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(completions, batch_first=True, padding_value=pad_id),
        "completion_mask": pad_sequence(
            [torch.full_like(row.completion_ids, 0 if row.masked else 1) for row in rows], batch_first=True
        ),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "coefficient": torch.tensor([row.coefficient for row in rows]),
        "source_logp": torch.tensor([row.source_logp for row in rows]),
        "source": torch.tensor([row.source for row in rows]),
        "filler": torch.tensor([row.filler for row in rows]),
    }
    batch["is_own"] = batch["source"] == learner
    for name in sorted({name for row in rows for name in row.per_token}):
        values = [row.per_token.get(name, torch.zeros(len(row.completion_ids))) for row in rows]
        batch[name] = pad_sequence(values, batch_first=True)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
