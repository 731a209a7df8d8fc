"""Responses as rows of micro-batches: each learner's own and its peers', in the learner's tokens.

Needs torch only. R is the number of responses of one agent on this process. See texts/responses.py for
the exchange of texts.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .texts.responses import EncodedResponses, ResponseTexts


@dataclass
class Rollout:
    """One agent's responses to the prompts of this process, all tensors on the CPU.

    Attributes:
        prompt_ids: R tensors (P_i,), the prompts in the agent's own template and tokens.
        completion_ids: R tensors (T_i,), the exact sampled tokens.
        texts: R responses as the reward functions read them, without special tokens and stop text.
        finished: R flags, True when the response ended itself, by an end token or a stop text.
        masked: R flags, True when `mask_truncated_completions` takes the response out of every loss.
        rewards: (B * G,) rewards of **all** processes, NaN for unscorable responses.
        sampled_logps: R tensors (T_i,) that vLLM reported, NaN where they are not usable; None without vLLM.
        logp_sums: (R,) sum of a response's log-probabilities that its writer's ratio compares with: under the weights
            that sampled it, or as vLLM reported it. NaN until it is known, see `HACPOAgent.measure`.
        peer_logp_sums: (R,) the same for the ratios of peers; by default the same tensor.
        for_peers: the responses as peers read them; None when nothing is shared.
    """

    prompt_ids: list[Tensor]
    completion_ids: list[Tensor]
    texts: list[str]
    finished: list[bool]
    masked: list[bool]
    rewards: Tensor
    for_peers: ResponseTexts | None = None
    sampled_logps: list[Tensor] | None = None
    logp_sums: Tensor = None  # type: ignore[assignment]
    peer_logp_sums: Tensor = None  # type: ignore[assignment]

    def __post_init__(self):
        if self.logp_sums is None:
            self.logp_sums = torch.full((len(self),), torch.nan)
        if self.peer_logp_sums is None:
            self.peer_logp_sums = self.logp_sums

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
        weight: fixed factor of its objective, in HACPO the discrepancy coefficient c(learner <- source).
        masked: True when the row must not act on any loss.
        index: its place in the source's rollout.
        logp_sums: (R,) of the source's rollout, where the sum that the ratio compares with stands once it is known.
        divisor: number of tokens that makes a mean of that sum.
        per_token: name -> (T,) what the own loss needs of every token ("ref_per_token_logps", "old_per_token_logps",
            "importance_sampling_ratio"); empty for peers' responses.
        filler: True for a row that only keeps a pass from being empty; the statistics leave it out.
    """

    source: int
    prompt_ids: Tensor
    completion_ids: Tensor
    advantage: float = 0.0
    weight: float = 1.0
    masked: bool = False
    index: int = 0
    logp_sums: Tensor | None = None
    divisor: int = 1
    per_token: dict[str, Tensor] = field(default_factory=dict)
    filler: bool = False

    @property
    def source_logp(self) -> float:
        """Mean log-probability that the ratio compares with; NaN as long as it is not known."""
        return math.nan if self.logp_sums is None else self.logp_sums[self.index].item() / self.divisor

    @property
    def can_teach(self) -> bool:
        """Whether the row can have a gradient of the objective (the clip range may still take it)."""
        return self.advantage != 0.0 and not self.masked

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def own_rows(rollout: Rollout, source: int, advantages: Tensor) -> list[Row]:
    """A learner's own responses, token by token as sampled.

    Args:
        rollout: the learner's own.
        source: the learner's index.
        advantages: (R,).
    """
    return [
        Row(
            source=source,
            prompt_ids=rollout.prompt_ids[i],
            completion_ids=rollout.completion_ids[i],
            advantage=advantages[i].item(),
            masked=rollout.masked[i],
            index=i,
            logp_sums=rollout.logp_sums,
            divisor=max(len(rollout.completion_ids[i]), 1),
        )
        for i in range(len(rollout))
    ]


def peer_rows(
    rollout: Rollout,
    encoded: EncodedResponses,
    prompt_ids: Sequence[Tensor],
    source: int,
    advantages: Tensor,
    weights: Tensor,
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
        weights: (R,) fixed factors for this learner.
        pad_id: stands for a response without any token.
        shared_length: divide the peer's summed log-probability by the learner's token count instead of the peer's.
        drop_overflowing: give a response beyond the learner's limit no advantage instead of cutting it.
    """
    rows = []
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
                weight=weights[i].item(),
                masked=empty,
                index=i,
                logp_sums=rollout.peer_logp_sums,
                divisor=length,
            )
        )
    return rows


class Plan(NamedTuple):
    """A learner's updates of a round.

    Attributes:
        batches: micro-batches in order; every `steps_per_update` of them make an update. The first ones of an update
            are empty lists where it needs fewer; all of them are where nothing in it can teach.
        left_out: for every update of one pass, source -> number of its responses that are not run.
        tokens: for every update of one pass, tokens of its responses, those that are not run included.
        teaching_peers: for every update of one pass, its peers' responses that can teach.
    """

    batches: list[list[Row]]
    left_out: list[Counter[int]]
    tokens: list[int]
    teaching_peers: list[int]


def arrange(
    own: Sequence[Row], peers: Sequence[Row], *, own_updates: int, updates: int, order: str, generations: int
) -> list[list[Row]]:
    """Shuffles a learner's rows of a round and deals them out to its updates.

    Args:
        own: its own responses.
        peers: those of all peers, or none.
        own_updates: updates that its own responses alone would make.
        updates: updates of one pass over the round.
        order: "own_first": updates on own responses, then updates on peers'; "shuffled" and "merged": all mixed;
            "peers_last": own ones first, peers' behind, where they meet an update holds both; "with_prompt": a peer's
            response joins the first update that holds an own response to its prompt.
        generations: responses of an agent to a prompt, which are neighbours in its rollout.

    Returns:
        The rows of every update, equally many where the order allows it.
    """
    own = [own[i] for i in torch.randperm(len(own)).tolist()]
    # Drawing for peers must not move the random numbers of a lone agent: N = 1 equals TRL's GRPOTrainer
    peers = [peers[i] for i in torch.randperm(len(peers)).tolist()] if peers else []
    if order == "own_first":
        return _split(own, own_updates) + _split(peers, updates - own_updates)
    if order == "with_prompt":
        parts = _split(own, updates)
        first: dict[int, list[Row]] = {}
        for part in parts:
            for row in part:
                first.setdefault(row.index // generations, part)
        for row in peers:
            first.get(row.index // generations, parts[-1]).append(row)
        return parts
    ordered = own + peers
    if order != "peers_last" and peers:
        ordered = [ordered[i] for i in torch.randperm(len(ordered)).tolist()]
    return _split(ordered, updates)


def _split(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """Cuts rows into parts of equally many."""
    bounds = [len(rows) * i // count for i in range(count + 1)] if count else [0]
    return [list(rows[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]


def plan_round(
    updates: Sequence[Sequence[Row]],
    own: Sequence[Row],
    *,
    rows_per_step: int,
    steps_per_update: int,
    iterations: int = 1,
    skip_silent: bool = True,
    own_always: bool = True,
    skip_updates: bool = False,
    cut: str = "rows",
    agree: Callable[[list[int]], list[int]] = lambda counts: counts,
) -> Plan:
    """Cuts a learner's updates of a round into micro-batches.

    Within an update the rows are sorted by length, so that little is padded. With `skip_silent` rows that have no
    gradient are left out. An update takes as few of its micro-batches as its rows need, the last ones.

    Args:
        updates: rows of every update, see `arrange`.
        own: all of the learner's own rows, in an update or not.
        rows_per_step: rows of a micro-batch; more where an update holds more than `steps_per_update` of them.
        steps_per_update: micro-batches of an update.
        iterations: passes over all rows.
        skip_silent: see above.
        own_always: own responses have a gradient without advantage, too (KL, entropy).
        skip_updates: an update in which no row of any process can teach has no micro-batch at all; without, each has
            at least one, with a row that fills it.
        cut: see `cut_rows`.
        agree: takes numbers of this process and returns the largest ones of all processes, which must run the same
            number of passes. Called once.

    Returns:
        The plan. The rows that it holds are those passed in, but fillers, which are copies.
    """

    learner = own[0].source

    def runs(row: Row) -> bool:
        return not skip_silent or row.can_teach or (own_always and row.source == learner)

    active = [[row for row in update if runs(row)] for update in updates]
    agreed = agree(
        [min(-(-len(rows) // rows_per_step), steps_per_update) for rows in active]
        + [int(any(row.can_teach for row in update)) for update in updates]
    )
    plan = Plan([], [], [], [])
    anything = [row for update in updates for row in update] or own[:1]  # one process may need more passes than rows
    for i, update in enumerate(updates):
        needed, teaches = agreed[i], agreed[len(updates) + i]
        steps = 0 if skip_updates and not teaches else max(needed, 1)
        rows = active[i] if steps else []
        plan.left_out.append(Counter(row.source for row in update) - Counter(row.source for row in rows))
        plan.tokens.append(sum(len(row.completion_ids) for row in update if not row.masked))
        plan.teaching_peers.append(sum(row.can_teach and row.source != learner for row in update))
        spare = [row for row in update if not runs(row)]
        spare += [replace(row, masked=True, advantage=0.0) for row in anything[:1]] * (steps - len(rows) - len(spare))
        plan.batches.extend(plan_update(rows, spare, steps, steps_per_update, cut))
    return plan._replace(batches=plan.batches * iterations)


def plan_update(
    rows: Sequence[Row], spare: Sequence[Row], steps: int, steps_per_update: int, cut: str = "rows"
) -> list[list[Row]]:
    """Cuts an update's rows into micro-batches.

    Args:
        rows: to be run.
        spare: others of the update; as many as are needed stand in where there are fewer rows than passes.
        steps: passes, at most `steps_per_update`.
        steps_per_update: micro-batches of the update.
        cut: see `cut_rows`.

    Returns:
        `steps_per_update` micro-batches. The last `steps` of them have rows, the others none.
    """
    rows = [*rows, *(replace(row, filler=True) for row in spare[: max(steps - len(rows), 0)])] if steps else []
    if steps_per_update > 1:
        rows.sort(key=len, reverse=True)
    return [[] for _ in range(steps_per_update - steps)] + cut_rows(rows, steps, cut)


def cut_rows(rows: Sequence[Row], count: int, cut: str = "rows") -> list[list[Row]]:
    """Cuts rows that are sorted by length into micro-batches, none of them empty.

    Args:
        rows: at least `count`.
        count: micro-batches.
        cut: "rows": equally many rows; "tokens": the padded size of the largest micro-batch is as small as it can
            be; "auto": by tokens where that makes it smaller by more than a tenth.
    """
    equal = _split(rows, count)
    if cut == "rows" or count < 2:
        return equal
    by_tokens = _cut_by_tokens(rows, count)
    largest = max(map(padded_tokens, equal))
    return equal if cut == "auto" and max(map(padded_tokens, by_tokens)) > 0.9 * largest else by_tokens


def padded_tokens(rows: Sequence[Row]) -> int:
    """Tokens of a micro-batch with its padding."""
    if not rows:
        return 0
    return len(rows) * (max(len(row.prompt_ids) for row in rows) + max(len(row.completion_ids) for row in rows))


def _cut_by_tokens(rows: Sequence[Row], count: int) -> list[list[Row]]:
    def filled(budget: int) -> list[list[Row]]:
        """As few micro-batches as a budget of padded tokens allows."""
        batches: list[list[Row]] = []
        prompt = completion = 0
        for row in rows:
            prompt, completion = max(prompt, len(row.prompt_ids)), max(completion, len(row.completion_ids))
            if not batches or (len(batches[-1]) + 1) * (prompt + completion) > budget:
                batches.append([])
                prompt, completion = len(row.prompt_ids), len(row.completion_ids)
            batches[-1].append(row)
        return batches

    low, high = max(map(len, rows)), padded_tokens(rows)
    while low < high:
        middle = (low + high) // 2
        if len(filled(middle)) <= count:
            high = middle
        else:
            low = middle + 1
    batches = filled(low)
    while len(batches) < count:  # passes that are left make the largest ones smaller
        index = max((i for i in range(len(batches)) if len(batches[i]) > 1), key=lambda i: padded_tokens(batches[i]))
        half = len(batches[index]) // 2
        batches[index : index + 1] = [batches[index][:half], batches[index][half:]]
    return batches


def collate(
    rows: Sequence[Row],
    *,
    learner: int,
    pad_id: int,
    device: torch.device | str = "cpu",
    padded_like: Sequence[Row] | None = None,
) -> dict:
    """A micro-batch, padded to its own longest prompt and response.

    Args:
        rows: R rows.
        learner: the learner's index.
        pad_id: fills the padding.
        device: where the tensors go.
        padded_like: pad to the longest prompt and response of these rows, which hold `rows`: under left padding the
            positions of the tokens, and in bf16 the log-probabilities, depend on it.

    Returns:
        prompt_ids, prompt_mask (R, P) padded on the left; completion_ids, completion_mask (R, T) padded on the right;
        advantages, weights, source_logp, is_own, source (R,); and every entry of `Row.per_token` that a row has,
        (R, T), with zeros for rows without it (peers').
    """
    count = len(rows)
    if padded_like is not None:  # the longest ones set the width, and are cut off below
        rows = [*rows, max(padded_like, key=lambda r: len(r.prompt_ids))]
        rows = [*rows, max(padded_like, key=lambda r: len(r.completion_ids))]
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
        "weights": torch.tensor([row.weight for row in rows]),
        "source_logp": torch.tensor([row.source_logp for row in rows]),
        "source": torch.tensor([row.source for row in rows]),
        "filler": torch.tensor([row.filler for row in rows]),
    }
    batch["is_own"] = batch["source"] == learner
    for name in sorted({name for row in rows for name in row.per_token}):
        values = [row.per_token.get(name, torch.zeros(len(row.completion_ids))) for row in rows]
        batch[name] = pad_sequence(values, batch_first=True)
    return {name: tensor[:count].to(device, non_blocking=True) for name, tensor in batch.items()}
