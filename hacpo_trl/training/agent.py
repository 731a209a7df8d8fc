"""HACPOAgent: one policy of a team. It and the trainer are what touches TRL's internals, see `_contract.py`."""

import contextlib
import functools
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, is_peft_model, set_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PrinterCallback, StoppingCriteriaList, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging
from trl.data_utils import is_conversational
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import is_async_callable, shutdown_event_loop_in_daemon, use_adapter

from .._contract import STEERS_LOGP_PASSES
from ..config import HACPOConfig
from ..hub.publishing import Publisher, find_base
from ..methods import PAPERS, Counts, Rows
from ..objective import k3_divergence, policy_loss, sampler_correction, sequence_log_ratio, summed_logps
from ..reporting.update_statistics import UpdateStatistics
from ..rollouts import Rollout, Row, arrange, collate, own_rows, peer_rows, plan_round, plan_update
from ..sampling.turn_taking import StopsWithOthers, Turns
from ..sampling.vllm_client import check_engine, connect, plain_generation_config, usable_logprobs
from ..texts.responses import ResponseTexts, encode_responses, end_of_response_id, find_leads, response_texts
from ..texts.stops import StopAtTexts, before_stop, cut_at_stop
from .arguments import numbered
from .fsdp import FSDPAgent
from .loading import fix_absolute_positions, keep_start, reference_of
from .offload import GradientBuckets, Residency

logger = logging.get_logger(__name__)

SEED_STRIDE = 1_000_003
"""Distance of seeds that must not meet: more than processes and rounds, whose numbers are added to a seed."""

Shares = dict[tuple[int, str], float]

# Screening leaves out what is farther outside of the clip range than the same response's ratio can differ between two
# micro-batches: see "Dependence on the micro-batch" in docs/algorithm.md
_SLACK_FP32, _SLACK_16_BIT = 1e-4, 0.02


class HACPOAgent(FSDPAgent):
    """Changes in GRPOTrainer: trains on a plan of micro-batches that holds the responses of all agents of a team.

    It samples and grades as GRPOTrainer does, reads its peers' responses in its own tokens, and has HACPO's loss. An
    agent that is not the leader does not run a loop of its own: `train()` only makes it ready, and the leader moves
    it on by `run_until`.

    Args:
        model: see `GRPOTrainer`; the KL reference is a copy of a model object, whatever its folder holds.
        reward_funcs: see `GRPOTrainer`.
        args: the agent's settings, see `HACPOConfig.for_agent`.
        agent_name: its name in logs and folders.
        agent_index: its place in the team.
        num_agents: N.
        residency: where agents sleep, or None to hold all on the device.
        turns: how agents share the time while they sample; by default the agent has it for itself.
        publisher: the team's connection to the Hub.
        **kwargs: passed on to `GRPOTrainer`.
    """

    _tag_names = ["trl", "hacpo"]
    _name = "HACPO"
    _paper = {
        "title": "Heterogeneous Agent Collaborative Reinforcement Learning",
        "id": PAPERS["HACPO"][0],
        "citation": PAPERS["HACPO"][1],
    }

    def __init__(
        self,
        model,
        reward_funcs,
        args: HACPOConfig,
        *,
        agent_name: str,
        agent_index: int,
        num_agents: int,
        residency: Residency | None = None,
        turns: Turns | None = None,
        publisher: Publisher | None = None,
        **kwargs,
    ):
        self.agent_name = agent_name
        self.agent_index = agent_index
        self.num_agents = num_agents
        self.residency = residency
        self.turns = turns or Turns()
        self.method = args.build_method()
        self.publisher = publisher
        self.buckets: GradientBuckets | None = None  # with DDP
        self.base = find_base(model, args)  # what it started from, for its card and repository
        self.team_state: Callable[[], TrainerState] = lambda: self.state  # what reward functions get
        self._rollout: Rollout | None = None
        self._own_rows: list[Row] = []
        self._taken_rows: list[Row] = []  # own ones that are in this round's updates
        self._peer_rows: list[Row] = []  # those of peers, until the updates are planned
        self._plan: list[list[Row]] = []
        self._left_out: list[Counter[int]] = []
        self._counts = [self._count(args, 1.0, 0.0)]  # of the updates of a pass over the round
        self._first_update: int | None = None  # index of the round's first update that steps
        self._update: list[list[Row]] = []  # micro-batches of the running update
        self._batch: list[Row] = []  # the running micro-batch
        self._padded_like: list[list[Row]] = []  # for each of them the one whose padding it has
        self._screened = False  # whether the running update's peers were counted before its first micro-batch
        self._constant_loss: Tensor | float = 0.0  # what the rows that screening left out add to the update's loss
        self.outside_share: float | None = None  # of peers' responses in the last round, see `screen_peers`
        self._graded: dict[str, Any] | None = None
        self._stopped: list[bool] = []
        self._sampled: dict[str, Any] = {}
        self._graders_thread_safe = False
        self._losses: list[Tensor] = []  # of the running update's micro-batches, left on the device
        self.grad_norms: list[Any] = []  # of the updates of the running round, before clipping
        self._final_step: int | None = None
        self._round_start = 0
        self.timings: dict[str, float] = defaultdict(float)  # seconds by phase, of the whole run
        if args.use_vllm and args.stop_texts:
            args.generation_kwargs = {**(args.generation_kwargs or {}), "stop": list(args.stop_texts)}
        if args.deepspeed_plugin is not None:
            # Accelerate knows one DeepSpeed plugin a process; every agent has its own, see `activate`
            AcceleratorState._reset_state()
            args.deepspeed_plugin.set_deepspeed_weakref()
        with reference_of(model), _seed_of_its_own(args, agent_index):
            try:
                super().__init__(model, reward_funcs, args, **kwargs)
            except ConnectionError as error:  # of its vLLM server
                raise ConnectionError(f"agent {agent_name!r}: {error}") from error
        if self.beta != 0.0 and is_peft_model(self.model):
            keep_start(self.model)
        self.reward_func_names = numbered(self.reward_func_names)  # logs and tables tell them apart by name
        fix_absolute_positions(self.accelerator.unwrap_model(self.model))
        self.statistics = UpdateStatistics(num_agents, agent_index, self.accelerator.device)
        self._taught = torch.zeros(3, device=self.accelerator.device)  # see `_count_taught`
        self._end_id: int | None = None
        if self.use_vllm:
            if self.vllm_mode == "server":
                sampler = self.args.source_logps == "sampler"
                connect(self.vllm_generation, agent_name, self._out_of_turn, needs_sampled_logprobs=sampler)
            else:
                check_engine(self.accelerator.unwrap_model(self.model), agent_name)
        if residency is not None:
            residency.register(self)
        if agent_index > 0:
            self.remove_callback(PrinterCallback)  # a peer reports through the leader

    def join_team(self, leader: "HACPOAgent") -> None:
        """Takes over what reward functions see of a trainer and a team has once.

        TRL gives every trainer an event loop, and a lock or a client that a function keeps belongs to the first loop
        that uses it. `trainer_state` is the leader's, whose log is the team's.
        """
        if getattr(self, "async_loop", None) is not None:
            # Not closed: TRL ends it once more at exit
            shutdown_event_loop_in_daemon(self.async_loop_thread, self.async_loop)
            self.async_loop, self.async_loop_thread = leader.async_loop, leader.async_loop_thread
        self.team_state = lambda: leader.state
        self.reward_func_names = list(leader.reward_func_names)  # a model in DeepSpeed's engine has no name any more

    def _out_of_turn(self, function: Callable[[], Any], **how: bool) -> Any:
        """Runs a function while the other agents have their turn; `how` as in `Turns.pause`."""
        result = self.turns.pause(function, **how)
        self.activate()
        return result

    def activate(self) -> None:
        """Makes the process ready to run this agent: before anything else of it is used.

        With DeepSpeed or FSDP its plugin becomes the process's current one: else the agent would run with another's
        accumulation, clipping and bucket sizes, and nothing would fail. With `offload_inactive_agents` its states come
        back to the device, and the other agents' go to sleep.
        """
        device = self.accelerator.device
        backend = getattr(torch, device.type, None)
        # A device without index is the only one of its kind here, and Apple's GPU cannot be set
        if device.index is not None and hasattr(backend, "set_device"):
            backend.set_device(device)
        if self.is_deepspeed_enabled:
            AcceleratorState().select_deepspeed_plugin(self.agent_name)
        self.restore_plugin()
        if self.residency is not None:
            self.residency.wake(self)

    # -- sampling -------------------------------------------------------------------------------------------------

    def sample(self, inputs: list[dict[str, Any]]) -> Rollout:
        """Samples and grades this agent's responses to the prompts of this process.

        Args:
            inputs: R rows of the data set, every prompt `num_generations` times in a row.

        Returns:
            The responses, on the CPU.
        """
        self.activate()
        self.reshard()
        started, waited = time.perf_counter(), self.turns.waited()
        self.model_wrapped.train()  # TRL reads from the model's mode whether it samples for training
        with self.without_logp_passes(), self._without_masking_stopped():
            output = self._generate_and_score_completions(inputs)
        graded, self._graded = self._graded, None
        finished = self._sampled["finished"]

        masks = output["completion_mask"].bool().cpu()
        sampled = None
        if "sampling_per_token_logps" in output:
            values = output["sampling_per_token_logps"].cpu()
            sampled = [v[: len(ids)].clone() for v, ids in zip(values, graded["completion_ids"], strict=True)]
        rollout = Rollout(
            prompt_ids=[
                ids[mask.bool()]
                for ids, mask in zip(output["prompt_ids"].cpu(), output["prompt_mask"].cpu(), strict=True)
            ],
            completion_ids=[torch.tensor(ids, dtype=torch.long) for ids in graded["completion_ids"]],
            texts=self._sampled["texts"],
            finished=finished,
            masked=[self.mask_truncated_completions and not done for done in finished]
            if self.args.stop_texts
            else (~masks.any(-1)).tolist(),
            rewards=graded["rewards"],
            for_peers=self._sampled["for_peers"],
            sampled_logps=sampled,
        )
        if self.args.shares_rollouts and self.args.source_logps == "sampler":
            rollout.peer_logp_sums = torch.stack([logps.sum() for logps in sampled])
            if not self._corrects_sampler:  # with the correction the own ratio starts from the training weights
                rollout.logp_sums = rollout.peer_logp_sums
        if self._end_id is None:
            self._end_id = end_of_response_id(
                self._tokenizer,
                self.eos_token_ids,
                conversational=is_conversational({"prompt": inputs[0]["prompt"]}),
                template_kwargs=self.chat_template_kwargs,
            )
        self.timings["sampling"] += time.perf_counter() - started - (self.turns.waited() - waited)
        return rollout

    def _generate(self, prompts):
        output = list(super()._generate(prompts))
        prompt_ids, completion_ids, completions = output[0], output[1], output[3]
        stops = self.args.stop_texts or ()
        ended = [bool(ids) and ids[-1] in self.eos_token_ids for ids in completion_ids]
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        for_peers = None
        if self.args.shares_rollouts and self.num_agents > 1:
            leads = find_leads(self._tokenizer, prompts, prompt_ids, self.chat_template_kwargs)
            written = [ids[:-1] if end else ids for ids, end in zip(completion_ids, ended, strict=True)]
            for_peers = ResponseTexts(response_texts(self._tokenizer, prompt_ids, leads, written), leads, ended)
            texts = [text if shared is None else shared for text, shared in zip(texts, for_peers.texts, strict=True)]
        texts = [before_stop(text, stops) for text in texts]
        if for_peers is not None or stops:  # else the graders read what TRL gives them
            output[3] = [_with_text(completion, text) for completion, text in zip(completions, texts, strict=True)]
        stopped = self._stopped if stops else [False] * len(ended)
        finished = [end or stop for end, stop in zip(ended, stopped, strict=True)]
        if stops:
            self._log_lengths(completion_ids, finished)
        self._sampled = {"texts": texts, "finished": finished, "for_peers": for_peers}
        return tuple(output)

    def _log_lengths(self, completion_ids: list[list[int]], finished: list[bool]) -> None:
        """Corrects TRL's metrics, which count a response without an end token as cut."""
        device = self.accelerator.device
        lengths = self.accelerator.gather(torch.tensor([len(ids) for ids in completion_ids], device=device)).float()
        done = self.accelerator.gather(torch.tensor(finished, device=device))
        terminated = lengths[done] if done.any() else torch.zeros(1, device=device)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["completions/clipped_ratio"][-1] = (~done).float().mean().item()
        for name in ("mean", "min", "max"):
            metrics[f"completions/{name}_terminated_length"][-1] = getattr(terminated, name)().item()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        calculate = functools.partial(super()._calculate_rewards, inputs, prompts, completions, completion_ids_list)
        alone = self.accelerator.num_processes == 1
        functions = self.reward_funcs
        self._graders_thread_safe = all(
            isinstance(f, nn.Module) or is_async_callable(f) or getattr(f, "thread_safe", False) for f in functions
        )
        logged: set[str] = set()
        self.reward_funcs = [
            function if isinstance(function, nn.Module) else self._reward_call(function, name, alone, logged)
            for function, name in zip(functions, self.reward_func_names, strict=True)
        ]
        try:
            # With several processes it ends in a collective operation: only the functions may run out of turn then
            rewards_per_func = self._grade(calculate) if alone else calculate()
        finally:
            self.reward_funcs = functions
        infinite = torch.isinf(rewards_per_func)
        if infinite.any():
            names = [n for n, bad in zip(self.reward_func_names, infinite.any(0).tolist(), strict=True) if bad]
            self._warn_once(f"Infinite rewards of {', '.join(names)} count as unscorable, like None and NaN.")
            rewards_per_func = rewards_per_func.masked_fill(infinite, torch.nan)
        weighted = rewards_per_func * self.reward_weights.to(rewards_per_func.device)
        rewards = weighted.nansum(1).masked_fill(torch.isnan(rewards_per_func).all(1), torch.nan)
        if self.model.training:
            self._graded = {"completion_ids": completion_ids_list, "rewards": rewards.cpu()}
        return rewards_per_func

    def _grade(self, function: Callable[[], Any]) -> Any:
        """Runs a grader; meanwhile the next agent samples.

        In the main thread, unless every function says that it does without by `thread_safe = True`: graders may rely
        on signals, as math-verify's time limit does, and would silently find nothing in another thread.
        """

        def timed():
            started = time.perf_counter()
            try:
                return function()
            finally:
                self.timings["grading"] += time.perf_counter() - started

        return self._out_of_turn(timed, on_main=not self._graders_thread_safe, is_work=False)

    def _reward_call(
        self, function: Callable[..., Any], name: str, graded: bool, logged: set[str]
    ) -> Callable[..., Any]:
        """A reward function as TRL calls it: with the data set's columns by name, whatever their names are.

        Args:
            function: the user's, sync or async.
            name: of the function.
            graded: whether the call is a part of a grading that has left its turn.
            logged: the columns that this agent's functions have logged for these completions.
        """

        def log_extra(column: str, values: list) -> None:
            # TRL would put two functions' values into one column of twice the length, which no table can take
            column = f"{column}/{name}" if column in logged else column
            logged.add(column)
            self._log_completion_extra(column, values)

        # Closures without parameters of their own: a column may have any name, "self" and "function" too
        if is_async_callable(function):

            async def reward(**columns):
                rewards = await function(**{**columns, "log_extra": log_extra, "trainer_state": self.team_state()})
                return _as_rewards(rewards, name)
        else:

            def reward(**columns):
                call = functools.partial(
                    function, **{**columns, "log_extra": log_extra, "trainer_state": self.team_state()}
                )
                return _as_rewards(call() if graded else self._grade(call), name)

        return reward

    def _warn_once(self, message: str) -> None:
        logger.warning_once(f"agent {self.agent_name!r}: {message}")

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        size = len(prompt_ids) if self.use_vllm else self.args.sampling_batch_size or len(prompt_ids)
        completion_ids, logprobs = [], None
        with self._stopping_generate(), plain_generation_config(self.accelerator.unwrap_model(self.model)):
            for start in range(0, len(prompt_ids), size):  # vLLM takes all at once
                ids, logprobs = super()._generate_single_turn(
                    prompt_ids[start : start + size], images, multimodal_fields, num_generations, **kwargs
                )
                completion_ids += ids
        if self.args.stop_texts:  # generate fills up, and vLLM may go on for a few tokens
            cuts = cut_at_stop(self._tokenizer, prompt_ids, completion_ids, self.args.stop_texts)
            self._stopped = [cut is not None for cut in cuts]
            completion_ids = [ids[:cut] for ids, cut in zip(completion_ids, cuts, strict=True)]
            if logprobs is not None:
                logprobs = [values[:cut] for values, cut in zip(logprobs, cuts, strict=True)]
        if logprobs is not None:
            logprobs, unusable = usable_logprobs(logprobs)
            if unusable:
                self._warn_once(
                    f"vLLM gave {unusable} of {len(logprobs)} responses log-probabilities that are not finite; such "
                    "responses take those of the training weights."
                )
        return completion_ids, logprobs

    @contextlib.contextmanager
    def _stopping_generate(self) -> Iterator[None]:
        """Has the model's `generate` stop at the stop texts, and with the team: TRL passes it no criteria of ours."""
        if self.use_vllm:
            yield
            return
        model = self.accelerator.unwrap_model(self.model_wrapped)
        generate = model.generate

        def generate_until_stop(*args, **kwargs):
            criteria = StoppingCriteriaList([StopsWithOthers(self.turns)])
            if self.args.stop_texts:
                width = kwargs["input_ids"].shape[1]
                criteria.append(StopAtTexts(self._tokenizer, self.args.stop_texts, width))
            return generate(*args, stopping_criteria=criteria, **kwargs)

        model.generate = generate_until_stop
        try:
            yield
        finally:
            del model.generate

    @contextlib.contextmanager
    def _without_masking_stopped(self) -> Iterator[None]:
        """Keeps TRL from masking responses that a stop text ended, since they have no end token."""
        masking = self.mask_truncated_completions
        self.mask_truncated_completions = masking and not self.args.stop_texts
        try:
            yield
        finally:
            self.mask_truncated_completions = masking

    @property
    def _corrects_sampler(self) -> bool:
        """Whether own responses are weighted for the difference between vLLM and the training weights."""
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def _needs_old(self) -> bool:
        """Whether own responses are compared token by token with the policy before the round: TRL's loss does, too."""
        return not self.args.shares_rollouts or self.method.compares_with_old

    @contextlib.contextmanager
    def without_logp_passes(self) -> Iterator[None]:
        """Keeps TRL from passes over the responses that it samples: they are made in the updates' micro-batches.

        TRL looks at three attributes to decide on the old log-probabilities, the correction of vLLM's and the
        reference's: the number of passes over a round, the correction's switch and beta. See `_contract.py`.
        """
        kept = {name: getattr(self, name) for name in STEERS_LOGP_PASSES}
        self.num_iterations = Fraction(self.args.gradient_accumulation_steps, self.args.steps_per_generation)
        self.vllm_importance_sampling_correction, self.beta = False, 0.0
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)

    # -- one round ------------------------------------------------------------------------------------------------

    def begin_round(self, rollouts: Sequence[Rollout], advantages: Tensor, weights: Tensor, taken: Tensor) -> Shares:
        """Reads the peers' responses. `plan_updates` has to follow.

        Args:
            rollouts: those of all agents, or of this agent alone when nothing is shared.
            advantages: (N sources, R) of this process's responses, for this learner.
            weights: (N sources, R) fixed factors of the responses' objectives.
            taken: (N sources, R) bool, which responses are rows of the updates.

        Returns:
            For the log, of every peer: source index and name of the share -> value.
        """
        started = time.perf_counter()
        own = self._rollout = rollouts[self.agent_index]
        self._own_rows = own_rows(own, self.agent_index, advantages[self.agent_index])
        self._taken_rows = [row for row in self._own_rows if taken[self.agent_index, row.index]]
        self._peer_rows, self._plan = [], []
        shares: Shares = {}
        if self.args.shares_rollouts:
            prompt_ids = [ids.tolist() for ids in own.prompt_ids]
            for j, rollout in enumerate(rollouts):
                if j == self.agent_index:
                    continue
                encoded = encode_responses(
                    self._tokenizer,
                    prompt_ids,
                    own.for_peers.leads,
                    rollout.for_peers.texts,
                    rollout.for_peers.ended,
                    self._end_id,
                    self.max_completion_length,
                )
                shares[j, "truncated"] = sum(encoded.overflowing) / len(rollout)
                shares[j, "unreadable"] = sum(encoded.unreadable) / len(rollout)
                rows = peer_rows(
                    rollout,
                    encoded,
                    own.prompt_ids,
                    j,
                    advantages[j],
                    weights[j],
                    pad_id=self._tokenizer.pad_token_id,
                    shared_length=self.args.length_normalization == "shared",
                    drop_overflowing=self.args.peer_overflow == "drop" or self.mask_truncated_completions,
                )
                self._peer_rows += [row for row in rows if taken[j, row.index]]
        self.timings["reencoding"] += time.perf_counter() - started
        return self._mean(shares)

    @torch.no_grad()
    def view_peers(self) -> Shares:
        """Finds this agent's own log-probabilities of its peers' responses, and weighs them by the method's `admit`.

        At the weights before the round's first update. The sources' log-probabilities have to be known.

        Returns:
            For the log, of every peer: the share of its taken responses that are admitted.
        """
        started = time.perf_counter()
        rows, size = self._peer_rows, self.args.per_device_train_batch_size
        teaching = [row for row in rows if row.can_teach or not self.args.skip_silent_responses]
        (passes,) = self._agree([-(-len(teaching) // size)])
        if passes:
            self.activate()
        spare = [replace(row, masked=True) for row in self._own_rows[:1]] * passes  # another process may have more
        ratios: dict[int, float] = {}
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for batch in plan_update(teaching, spare, passes, passes, "tokens"):
                inputs = self._collate(batch)
                logps, _, _ = self._logps_of(self.model, inputs)
                found = sequence_log_ratio(logps, inputs["completion_mask"], inputs["source_logp"]).exp()
                for row, values, ratio in zip(batch, logps.float().cpu(), found.tolist(), strict=True):
                    row.per_token["old_per_token_logps"] = values[: len(row.completion_ids)].clone()
                    ratios[id(row)] = ratio
        if passes:
            self.reshard()
        ratio = torch.tensor([ratios.get(id(row), 1.0) for row in rows])
        factors = self.method.admit(ratio, torch.tensor([row.advantage for row in rows]))
        for row, factor in zip(rows, factors.tolist(), strict=True):
            row.weight *= factor
        self._peer_rows = [row for row in rows if row.weight != 0.0]
        sources = [j for j in range(self.num_agents) if j != self.agent_index]
        counts = self._mean(
            {(j, what): float(sum(row.source == j for row in some))
             for j in sources for what, some in (("offered", rows), ("admitted", self._peer_rows))}
        )  # fmt: skip
        self.timings["updating"] += time.perf_counter() - started
        return {(j, "admitted"): counts[j, "admitted"] / (counts[j, "offered"] or 1.0) for j in sources}

    def plan_updates(self) -> None:
        """Plans this agent's updates of the round."""
        started, args, shares = time.perf_counter(), self.args, self.args.shares_rollouts
        updates = arrange(
            self._taken_rows,
            self._peer_rows,
            own_updates=args.steps_per_generation // args.gradient_accumulation_steps,
            updates=self.steps_per_round // args.gradient_accumulation_steps // self.num_iterations,
            order=args.order,
            generations=self.num_generations,
        )
        plan = plan_round(
            updates,
            self._own_rows,
            rows_per_step=args.per_device_train_batch_size,
            steps_per_update=args.gradient_accumulation_steps,
            iterations=self.num_iterations,
            # TRL's own loss is a mean over equally many rows; the router's loss sees every row
            skip_silent=args.skip_silent_responses and shares and not self.aux_loss_enabled,
            own_always=self.beta != 0.0 or self.entropy_coef != 0.0,
            skip_updates=self._skips_updates,
            cut=args.micro_batches if shares and not self.aux_loss_enabled else "rows",
            agree=self._agree,
        )
        self._plan, self._left_out = plan.batches, plan.left_out
        tokens, peers = plan.tokens, plan.teaching_peers
        if self.method.counts_tokens and self.accelerator.num_processes > 1:
            local = torch.tensor([tokens, peers], dtype=torch.float32, device=self.accelerator.device)
            tokens, peers = self.accelerator.reduce(local, "mean").tolist()
        self._counts = [self._count(args, *counted) for counted in zip(tokens, peers, strict=True)]
        stepping = [i for i, batch in enumerate(self._plan) if batch]
        from_sampler = shares and args.source_logps == "sampler" and not self._corrects_sampler
        self._first_update = None
        if stepping and not from_sampler:
            self._first_update = stepping[0] // args.gradient_accumulation_steps
        self.timings["reencoding"] += time.perf_counter() - started

    def _count(self, args: HACPOConfig, tokens: float, peers: float) -> Counts:
        return Counts(args.rows_per_update(self.num_agents), max(tokens, 1.0), peers, args.max_completion_length)

    @property
    def _skips_updates(self) -> bool:
        """Whether an update without a gradient of the objective takes no step."""
        other_gradients = self.aux_loss_enabled or self.entropy_coef != 0.0
        # DeepSpeed steps by itself in its last backward pass, and torch's gradient scaler cannot without gradients
        always = self.is_deepspeed_enabled or self.accelerator.scaler is not None
        return self.args.skip_idle_updates and not other_gradients and not always

    def heard(self, source: int) -> set[int]:
        """Places in a peer's rollout of the responses that this agent's updates run, or may run before the plan."""
        rows = itertools.chain(*self._plan) if self._plan else self._peer_rows
        return {row.index for row in rows if row.source == source}

    @torch.no_grad()
    def measure(self, heard: set[int], *, all_rows: bool = False) -> None:
        """Finds the log-probabilities that this round's ratios and divergences of own responses compare with.

        At the weights that sampled, so before the round's first update, and in the very micro-batches of the updates:
        in bf16 other padding gives other numbers, by more than GSPO's clip range. What the first update finds by
        itself is not computed here.

        Args:
            heard: places in this agent's rollout of the responses that peers run.
            all_rows: leave nothing to the first update.
        """
        started, rollout = time.perf_counter(), self._rollout
        one_pass = len(self._plan) // self.num_iterations
        plan = [
            (step // self.args.gradient_accumulation_steps, rows) for step, rows in enumerate(self._plan[:one_pass])
        ]
        # The first update's sums come in time for peers that are updated after it and in turn
        in_time = self.args.order == "own_first" and self.residency is None

        def wants_old(row: Row, update: int) -> bool:
            first = update == self._first_update and not all_rows
            if self._corrects_sampler:
                return True
            if self._needs_old and (not first or self.num_iterations > 1):
                return True
            if not self.args.shares_rollouts:
                return False
            peers_want = row.index in heard and rollout.peer_logp_sums[row.index].isnan()
            return bool(
                (peers_want and not (first and in_time)) or (not first and rollout.logp_sums[row.index].isnan())
            )

        own = [[row for row in rows if row.source == self.agent_index] for _, rows in plan]
        old = [int(any(wants_old(row, m) for row in rows)) for (m, _), rows in zip(plan, own, strict=True)]
        reference = [int(bool(rows) and self.beta != 0.0) for rows in own]
        planned = {row.index for rows in own for row in rows}
        rest = [i for i in heard - planned if rollout.peer_logp_sums[i].isnan()]
        extra = -(-len(rest) // self.args.per_device_train_batch_size)
        *flags, extra = self._agree([*old, *reference, extra])  # all processes run the same number of passes
        if not any(flags) and not extra:
            return
        self.activate()
        divergences: list[tuple[Tensor, Tensor]] = []
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for i, ((_, batch), rows) in enumerate(zip(plan, own, strict=True)):
                rows = rows or batch[:1]  # keeps the other processes company
                if flags[i]:
                    self._find_old(rows, batch, divergences)
                if flags[len(plan) + i]:
                    self._find_reference(rows, batch)
            unused = sorted(set(range(len(rollout))) - set(rest))
            spare = [self._own_rows[i] for i in unused]
            for rows in plan_update([self._own_rows[i] for i in rest], spare, extra, extra, "tokens"):
                self._find_old(rows, rows, divergences)
        self.reshard()
        if self._corrects_sampler:
            self._log_correction(divergences)
        self.timings["updating"] += time.perf_counter() - started

    def _find_old(self, rows: list[Row], batch: list[Row], divergences: list[tuple[Tensor, Tensor]]) -> None:
        """One pass for the old log-probabilities of some rows of a micro-batch.

        Args:
            rows: of which at least one is an own one.
            batch: the micro-batch.
            divergences: takes, of every row, the distance between vLLM and the training weights, and its correction.
        """
        inputs = self._collate(rows, padded_like=batch)
        logps, _, _ = self._logps_of(self.model, inputs)
        self._keep_sums(rows, summed_logps(logps, inputs["completion_mask"]))
        if not self._needs_old and not self._corrects_sampler:
            return
        for row, values in zip(rows, logps.float().cpu(), strict=True):
            if row.source != self.agent_index:
                continue
            old = values[: len(row.completion_ids)].clone()
            if self._needs_old:
                row.per_token["old_per_token_logps"] = old
            if self._corrects_sampler and not row.masked:
                sampled = self._rollout.sampled_logps[row.index]
                weights = sampler_correction(
                    old,
                    sampled,
                    self.vllm_importance_sampling_mode,
                    self.vllm_importance_sampling_clip_min,
                    self.vllm_importance_sampling_clip_max,
                )
                row.per_token["importance_sampling_ratio"] = weights
                sequence = self.vllm_importance_sampling_mode.startswith("sequence")
                divergences.append(((old - sampled).abs(), weights[:1] if sequence else weights))

    def _keep_sums(self, rows: Sequence[Row], sums: Tensor) -> None:
        """Fills in what is unknown of the own rollout's sums."""
        rollout = self._rollout
        for row, value in zip(rows, sums.float().cpu(), strict=True):
            if row.source == self.agent_index:
                for known in (rollout.logp_sums, rollout.peer_logp_sums):
                    if known[row.index].isnan():
                        known[row.index] = value

    def _find_reference(self, rows: list[Row], batch: list[Row]) -> None:
        """One pass for the reference's log-probabilities of some rows of a micro-batch."""
        inputs = self._collate(rows, padded_like=batch)
        if self.ref_model is not None:
            logps, _, _ = self._logps_of(self.ref_model, inputs)
        else:  # an adapter's reference is the model without it, or a copy of an adapter that is trained further
            model = self.accelerator.unwrap_model(self.model)
            with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
                logps, _, _ = self._logps_of(self.model, inputs)
        for row, values in zip(rows, logps.float().cpu(), strict=True):
            if row.source == self.agent_index:
                row.per_token["ref_per_token_logps"] = values[: len(row.completion_ids)].clone()

    def _log_correction(self, divergences: Sequence[tuple[Tensor, Tensor]]) -> None:
        """TRL's metrics of the difference between vLLM and the training weights."""
        differences = torch.cat([torch.zeros(0), *(d[~d.isnan()] for d, _ in divergences)])
        weights = torch.cat([torch.zeros(0), *(w for _, w in divergences)])
        known = [
            (f"{group}/{name}", getattr(values, name)().item() if len(values) else 0.0)
            for group, values, names in (
                ("sampling/sampling_logp_difference", differences, ("mean", "max")),
                ("sampling/importance_sampling_ratio", weights, ("min", "mean", "max")),
            )
            for name in names
        ]
        local = torch.tensor([[value for _, value in known]], device=self.accelerator.device)
        gathered = self.accelerator.gather(local)
        reduced = {"mean": gathered.mean(0), "min": gathered.amin(0), "max": gathered.amax(0)}
        for i, (name, _) in enumerate(known):
            self._metrics["train"][name].append(reduced[name.rsplit("/", 1)[1]][i].item())

    def _agree(self, counts: list[int]) -> list[int]:
        """The largest of every count over all processes."""
        if self.accelerator.num_processes == 1:
            return counts
        local = torch.tensor([counts], device=self.accelerator.device)
        return self.accelerator.gather(local).amax(0).tolist()

    def _mean(self, shares: Shares) -> Shares:
        """The mean of every share over all processes, which have them in the same order."""
        if self.accelerator.num_processes == 1 or not shares:
            return shares
        local = torch.tensor(list(shares.values()), dtype=torch.float64, device=self.accelerator.device)
        return dict(zip(shares, self.accelerator.reduce(local, "mean").tolist(), strict=True))

    @property
    def steps_per_round(self) -> int:
        """Micro-batches of this agent in one round."""
        updates = self.args.updates_per_round(self.num_agents)
        return updates * self.args.gradient_accumulation_steps

    # -- updates --------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch):
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)  # evaluation: this agent alone
        update, inside = divmod(self._step % self.steps_per_round, self.args.gradient_accumulation_steps)
        self._batch = self._update[inside]
        batch = self._collate(self._batch, padded_like=self._padded_like[inside])
        batch["update_index"] = update
        batch["is_first"] = update == self._first_update
        if batch["is_first"]:  # the weights are those that sampled: the loss's own log-probabilities are the old ones
            batch.pop("old_per_token_logps", None)
        return batch

    def _collate(self, rows: Sequence[Row], padded_like: Sequence[Row] | None = None) -> dict[str, Any]:
        return collate(
            rows,
            learner=self.agent_index,
            pad_id=self._tokenizer.pad_token_id,
            device=self.accelerator.device,
            padded_like=padded_like,
        )

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.activate()
        started = time.perf_counter()
        update, inside = divmod(self._step % self.steps_per_round, self.args.gradient_accumulation_steps)
        if inside == 0:
            self._begin_update(update)
        if self._update[inside]:
            if self.buckets is not None:
                self.buckets.attach()
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:  # no process has a row for this micro-batch
            self._step += 1
            loss = torch.zeros((), device=self.accelerator.device)
        if inside == 0:
            loss = loss + self._constant_loss
        if inside == self.args.gradient_accumulation_steps - 1:
            self._end_update(update)
        self.timings["updating"] += time.perf_counter() - started
        return loss

    def _begin_update(self, update: int) -> None:
        """Takes an update's micro-batches out of the plan."""
        size = self.args.gradient_accumulation_steps
        self._update = self._plan[update * size : (update + 1) * size]
        # Counted now, so that it is logged with the update it belongs to
        for source, count in self._left_out[update % len(self._left_out)].items():
            self.statistics.add_silent(source, count)
        self._padded_like, self._constant_loss, self._screened = self._update, 0.0, False
        if self._screens(update):
            self._screen(update)
            self._screened = True

    def _screens(self, update: int) -> bool:
        """Whether an update's peers outside of the clip range are looked for first. The same on all processes."""
        args = self.args
        if args.screen_peers == "off" or not args.shares_rollouts or self.aux_loss_enabled or not any(self._update):
            return False
        if not self.method.can_clip_peers():
            return False
        own_updates = args.steps_per_generation // args.gradient_accumulation_steps
        in_order = args.order == "own_first"
        if self.num_agents == 1 or (in_order and update % len(self._left_out) < own_updates):
            return False  # no peers in it
        # A forward pass against the share of a forward and backward pass, with checkpoints two forward passes
        pays_from = 1 / 4 if args.gradient_checkpointing else 1 / 3
        return args.screen_peers == "on" or (self.outside_share or 0.0) > pays_from

    @torch.no_grad()
    def _screen(self, update: int) -> None:
        """Takes the peers' rows that have no gradient, by the clip range, out of an update's micro-batches.

        One pass over them at exactly the weights of the update, which also makes their statistics and their part of
        the loss, a constant.
        """
        exact = not (self.args.bf16 or self.args.fp16) and next(self.model.parameters()).dtype == torch.float32
        slack = _SLACK_FP32 if exact else _SLACK_16_BIT
        screened: list[Row] = []
        stays: list[Tensor] = []
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for batch in filter(None, self._update):
                # An own row keeps the other processes company
                rows = [row for row in batch if row.source != self.agent_index] or batch[:1]
                inputs = self._collate(rows, padded_like=batch)
                logps, _, _ = self._logps_of(self.model, inputs)
                mask, is_own = inputs["completion_mask"], inputs["is_own"]
                seen = self._rows(inputs, logps, inputs["source_logp"], update)
                keep = self.method.clipped(seen, slack).inside & (inputs["advantages"] != 0)
                keep = is_own | (keep & mask.any(-1))
                uncounted = inputs["filler"] | is_own
                self._count_taught(inputs, self._add_statistics(inputs, seen, None, None, uncounted), uncounted)
                left_out = ~keep & ~uncounted & mask.any(-1)
                _, peers = self.method.denominators(self._counts[update % len(self._counts)])
                self._constant_loss -= torch.where(left_out, self.method.objective(seen), 0.0).sum() / peers
                screened += rows
                stays.append(keep)
        self.reshard()
        self._taught[0] = 0  # counted again when they are run
        outside = {id(row) for row, stay in zip(screened, torch.cat(stays).tolist(), strict=True) if not stay}
        kept = [[row for row in batch if id(row) not in outside] for batch in self._update]
        spare = [[row for row in batch if id(row) in outside] for batch in self._update]
        if self.args.order == "own_first":
            self._update = self._padded_like = self._cut_again(sum(kept, []), sum(spare, []))
        else:  # own rows keep the padding of the micro-batch in which their old log-probabilities were computed
            self._update = self._thin_out(kept, spare)

    def _cut_again(self, kept: list[Row], spare: list[Row]) -> list[list[Row]]:
        """An update of as few micro-batches as its rows need."""
        size = self.args.per_device_train_batch_size
        steps, teaches = self._agree([-(-len(kept) // size), int(bool(kept))])
        steps = 0 if self._skips_updates and not teaches else max(steps, 1)
        return plan_update(kept, spare, steps, self.args.gradient_accumulation_steps, self.args.micro_batches)

    def _thin_out(self, kept: list[list[Row]], spare: list[list[Row]]) -> list[list[Row]]:
        """An update whose micro-batches lose rows. Those that no process needs come first and are not run."""
        can_teach = any(row.can_teach for batch in kept for row in batch)
        *runs, teaches = self._agree([*(int(bool(batch)) for batch in kept), int(can_teach)])
        if self._skips_updates and not teaches:
            for row in (row for batch in kept for row in batch if not row.filler):
                self.statistics.add_silent(row.source, 1)
            return [[] for _ in kept]
        if not any(runs):
            runs[-1] = 1
        # The last one has to run: there DDP sums the gradients of all processes
        order = sorted(range(len(runs)), key=runs.__getitem__)
        self._padded_like = [self._update[i] for i in order]
        return [kept[i] or ([replace(spare[i][0], filler=True)] if runs[i] else []) for i in order]

    def _end_update(self, update: int) -> None:
        """Drops the gradients of an update in which no response of any process has one of the objective."""
        steps = any(self._update)
        if self.args.shares_rollouts and self._skips_updates and steps:
            steps = bool(self._agree([int(self._taught[0] > 0)])[0])
            if not steps:
                self.model_wrapped.zero_grad()
        self._metrics["train"]["skipped_updates"].append(float(not steps))
        self._taught[0] = 0
        if (update + 1) % (self.steps_per_round // self.args.gradient_accumulation_steps) == 0:
            outside, heard = self.accelerator.reduce(self._taught[1:].clone(), "sum").tolist()
            self.outside_share = outside / heard if heard else None
            self._taught.zero_()

    def _count_taught(self, inputs: dict[str, Any], teaches: Tensor, uncounted: Tensor) -> None:
        """Counts responses with a gradient in the update, peers' without one in the round, and all peers' that ran."""
        peers = ~inputs["is_own"] & ~uncounted & (inputs["advantages"] != 0)
        self._taught += torch.stack([teaches.sum(), (peers & ~teaches).sum(), peers.sum()]).to(self._taught)

    def _rows(self, inputs: dict[str, Any], logps: Tensor, source_logp: Tensor, update: int) -> Rows:
        """A micro-batch as the method sees it."""
        return Rows(
            logps=logps,
            mask=inputs["completion_mask"],
            source_logp=source_logp,
            # At the weights before the round's first update the old ones are these
            old_logps=inputs.get("old_per_token_logps", logps.detach()),
            advantages=inputs["advantages"],
            weights=inputs["weights"],
            is_own=inputs["is_own"],
            update_index=update,
            clip_range=(self.epsilon_low, self.epsilon_high),
        )

    def _add_statistics(
        self, inputs: dict[str, Any], rows: Rows, kl: Tensor | None, entropies: Tensor | None, uncounted: Tensor
    ) -> Tensor:
        return self.statistics.add(
            source=inputs["source"],
            ratio=rows.ratio,
            clipped=self.method.clipped(rows),
            advantages=torch.where(rows.mask.any(-1), rows.advantages, 0.0),
            kl=kl,
            entropy=entropies,
            mask=rows.mask,
            filler=uncounted,
        )

    def _logps_of(self, model: nn.Module, batch: dict[str, Any], **kwargs) -> tuple[Tensor, Tensor | None, Any]:
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            **kwargs,
        )

    def _compute_loss(self, model, inputs):
        if not (self.model.training and self.args.shares_rollouts):
            return super()._compute_loss(model, inputs)  # the baselines "gspo" and "grpo" are TRL's own
        mask, args = inputs["completion_mask"], self.args
        logps, entropies, aux_loss = self._logps_of(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        is_own, source_logp, update = inputs["is_own"], inputs["source_logp"], inputs["update_index"]
        if inputs["is_first"]:
            sums = summed_logps(logps.detach(), mask)
            source_logp = torch.where(is_own, sums / mask.sum(-1).clamp(min=1), source_logp)
            self._keep_sums(self._batch, sums)
        rows = self._rows(inputs, logps, source_logp, update)
        objective = self.method.objective(rows)  # (R,)
        if "importance_sampling_ratio" in inputs:  # vLLM's sampler against the training weights, own responses only
            correction = (inputs["importance_sampling_ratio"] * mask).sum(-1) / mask.sum(-1).clamp(min=1)
            objective = objective * torch.where(is_own, correction, torch.ones_like(correction))
        # A filler's objective is a constant that belongs to no update, or was counted when its update was screened
        objective = torch.where(mask.any(-1) & ~inputs["filler"], objective, logps.sum(-1) * 0.0)

        divergence = kl = None
        if self.beta != 0.0:
            reference = inputs.get("ref_per_token_logps", logps.detach())
            kl = k3_divergence(logps, torch.where(is_own[:, None], reference, logps.detach()), mask)
            divergence = kl * (rows.ratio if args.use_bias_correction_kl else 1.0)
        # Sums over the update's rows, not means: a micro-batch may hold fewer rows than another
        counts = self._counts[update % len(self._counts)]
        loss = policy_loss(
            objective,
            is_own,
            self.method.denominators(counts),
            counts.rows,
            divergence=divergence,
            beta=self.beta,
            entropy=(entropies * mask).sum(-1) / mask.sum(-1).clamp(min=1) if self.entropy_coef != 0.0 else None,
            entropy_coef=self.entropy_coef,
        )
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / args.gradient_accumulation_steps

        uncounted = inputs["filler"] | ~is_own if self._screened else inputs["filler"]
        with torch.no_grad():
            kl = None if kl is None else kl * is_own
            self._count_taught(inputs, self._add_statistics(inputs, rows, kl, entropies, uncounted), uncounted)
        return loss

    # -- a peer's part in the leader's loop -----------------------------------------------------------------------

    def make_ready(self, final_step: int, resume_from_checkpoint: str | None) -> None:
        """Prepares a peer for training: everything that `Trainer.train` does before its loop.

        Args:
            final_step: updates of this agent in the whole run, for its learning rate schedule.
            resume_from_checkpoint: this agent's folder of a checkpoint, or None.
        """
        self._final_step = final_step
        self.train(resume_from_checkpoint=resume_from_checkpoint)

    def _inner_training_loop(
        self, batch_size=None, args=None, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None
    ):
        # `Trainer.train` ends in this loop. A peer only gets ready here; the leader runs the loop.
        self.accelerator.free_memory()
        self.model_wrapped = self.model  # an engine of an earlier run cannot be prepared again
        self._step = 0
        self.state = TrainerState()
        if resume_from_checkpoint is not None:
            self.state = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME))
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.max_steps = self._final_step
        model, _ = self._prepare_for_training(self._final_step, None, resume_from_checkpoint)
        model.zero_grad()

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        self.activate()
        if self.use_vllm:
            self._last_loaded_step = -1  # a checkpoint may have the step, but not the weights, of the last sync
        self.buckets = None
        model, train_dataloader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if isinstance(model, DistributedDataParallel) and not model.static_graph:
            self.buckets = GradientBuckets(model)
        return model, train_dataloader

    def _build_accelerator_args(self, **kwargs):
        built = super()._build_accelerator_args(**kwargs)
        for handler in built["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True
        return built

    def _save_optimizer_and_scheduler(self, output_dir):
        self.activate()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.activate()
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result):
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        if set(load_result.missing_keys) - tied or load_result.unexpected_keys:  # tied weights are saved once
            super()._issue_warnings_after_load(load_result)

    def _load_best_model(self):
        self.activate()
        super()._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `Trainer.save_model`."""
        self.activate()
        super().save_model(output_dir, _internal_call)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Opens this agent's repository; see `HACPOTrainer.init_hf_repo`."""
        if self.publisher is None:
            super().init_hf_repo(token, private)
        elif self.is_world_process_zero():
            self.hub_model_id = self.publisher.open(self.agent_name, token, private)

    def push_to_hub(self, *args, **kwargs) -> Any:
        """Agents are pushed by their team.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"agent {self.agent_name!r} is pushed with its team, whose members its card names: use the trainer's "
            "push_to_hub()."
        )

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """See `Trainer.evaluate`."""
        self.activate()
        return super().evaluate(*args, **kwargs)

    def run_until(self, step: int) -> None:
        """Moves a peer on to a number of micro-batches of the running round.

        Args:
            step: micro-batches that shall be done, at most `steps_per_round`.
        """
        accumulation = self.args.gradient_accumulation_steps
        self.current_gradient_accumulation_steps = accumulation
        gradient_state = self.accelerator.gradient_state  # shared by all agents of the process
        leaders_sync = gradient_state.sync_gradients
        done = self._step - self._round_start
        while done < step:
            done += 1
            is_update = done % accumulation == 0
            gradient_state._set_sync_gradients(is_update)
            syncs = gradient_state.plugin_kwargs.get("sync_each_batch", False)
            if is_update or syncs or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                context = contextlib.nullcontext()
            else:
                context = self.accelerator.no_sync(model=self.model_wrapped)
            with context:
                self._losses.append(self.training_step(self.model_wrapped, None))
            if is_update:
                started = time.perf_counter()
                self._step_optimizer()
                self.timings["updating"] += time.perf_counter() - started
        gradient_state._set_sync_gradients(leaders_sync)

    def open_round(self) -> None:
        """Marks the first micro-batch of a round."""
        self._round_start = self._step
        self.grad_norms.clear()

    def _step_optimizer(self) -> None:
        metrics = self._metrics["train"]
        grad_norm = None
        if self.args.max_grad_norm > 0:
            grad_norm = self._clip_grad_norm(self.model_wrapped)
        grad_norm = self._get_grad_norm(self.model_wrapped, grad_norm=grad_norm)
        self.optimizer.step()
        metrics["learning_rate"] = [self._get_learning_rate()]
        if grad_norm is not None:
            metrics["grad_norm"].append(grad_norm.item() if isinstance(grad_norm, Tensor) else grad_norm)
        loss = torch.stack(self._losses).float().sum()
        metrics["loss"].append(self.accelerator.gather(loss[None]).mean().item())
        self._losses.clear()
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()
        self.model_wrapped.zero_grad()
        self.state.global_step += 1
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)

    # -- reports --------------------------------------------------------------------------------------------------

    def drain_statistics(self, reader: str = "log") -> list[dict[str, float]]:
        """Statistics of the updates since this reader's last call, one dict per source, over all processes.

        Without a reference there is no "kl": it was not measured.
        """

        def reduce(tensor: Tensor, kind: str) -> Tensor:
            if self.accelerator.num_processes == 1:
                return tensor
            gathered = self.accelerator.gather(tensor[None])
            return gathered.sum(0) if kind == "sum" else gathered.amax(0)

        statistics = self.statistics.drain(reduce, reader)
        if self.beta == 0.0:
            statistics[self.agent_index].pop("kl", None)
        return statistics

    def _get_grad_norm(self, model, grad_norm=None):
        if self.is_deepspeed_enabled and self._update and not any(self._update):
            norm = 0.0  # the engine would tell the norm of the update before
        else:
            norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:
            self.grad_norms.append(norm)
        return norm


@contextlib.contextmanager
def _seed_of_its_own(args: HACPOConfig, agent_index: int) -> Iterator[None]:
    """Lets TRL initialise an agent's adapter by another seed than the other agents'.

    The leader keeps the team's. Afterwards the process has the random state that it would have with the team's: all
    agents draw from it one after the other, so that their samples differ.
    """
    seed = args.seed
    args.seed = (seed + agent_index * SEED_STRIDE) % 2**32
    try:
        yield
    finally:
        args.seed = seed
    engine = args.use_vllm and args.vllm_mode == "colocate"  # has set a random state of its own
    if agent_index > 0 and not engine:
        set_seed(seed, device_specific=True)


def _as_rewards(rewards: Any, name: str) -> list[float | None]:
    try:
        return [reward if reward is None else float(reward) for reward in rewards]
    except (TypeError, ValueError):
        raise TypeError(
            f"The reward function {name!r} returned {rewards!r:.80}; it has to return a list with a number or "
            "None for each completion."
        ) from None


def _with_text(completion: Any, text: str) -> Any:
    """A completion as the graders take it, text or chat, with another text; a message that a tokenizer has parsed into
    parts of its own keeps them."""
    if isinstance(completion, str):
        return text
    (message,) = completion
    return [{**message, "content": text}] if message.keys() == {"role", "content"} else completion
