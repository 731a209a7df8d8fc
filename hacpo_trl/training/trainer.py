"""HACPOTrainer: the leader of a team of agents."""

import contextlib
import functools
import json
import math
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from .._contract import check_versions, hush_renamed
from ..capability import CapabilityTracker
from ..config import HACPOConfig
from ..hub.publishing import Publisher, check_sharing
from ..methods import Pool, Signal
from ..objective import is_right, rewards_differ
from ..reporting.advice import RoundSigns
from ..reporting.completion_tables import CompletionTables
from ..reporting.round_progress import RoundProgress, WatchedTeam
from ..reporting.run_page import RUN_FILE
from ..sampling.turn_taking import Turns
from ..sampling.vllm_client import warn_of_equal_samplers
from ..texts.prompts import PromptForm
from .agent import SEED_STRIDE, HACPOAgent
from .arguments import (
    check_dataset,
    check_models,
    check_offload,
    load_tokenizers,
    per_agent,
    refuse,
    resolve_names,
    resolve_optimizers,
    resolve_peft_configs,
    resolve_rewards,
    warn_if_alone,
)
from .checkpoint import check_checkpoint, find_checkpoint
from .fsdp import check_fsdp
from .loading import check_optimizer, check_trainable, load_adapters, shared_tensors, use_default_adapter
from .offload import Residency
from .team_files import TeamFiles
from .team_log import TeamLog


class HACPOTrainer(TeamLog, TeamFiles):
    """Changes in HACPOAgent: it is agent 0, and leads the others through rounds of sampling and updating.

    Its loop is that of `transformers.Trainer`. At the first step of a round every agent samples; then, with each of
    its own steps, it moves the peers on. Saving, evaluating and stopping wait for the end of the round.

    Args:
        models: one per agent: a Hub id, a folder, a model object or a PeftModel. The folder or id of an adapter, as
            `save_model` writes it, goes on training that adapter. The KL reference is the agent's own start: a model
            object or an adapter as it is passed.
        reward_funcs: see `GRPOTrainer`: functions (sync or async), reward models, or a list of them. Every response
            is graded once. Async functions of all agents run in one event loop. Functions of one name are numbered.
        args: settings, by default `HACPOConfig("hacpo_output")`.
        train_dataset: prompts in the column "prompt" (texts or chats); all other columns go to the reward functions.
        eval_dataset: see `GRPOTrainer`, one or several by name; every agent is evaluated alone.
        processing_classes: tokenizers, one per agent; None (also in the list) loads the model's.
        reward_processing_classes: see `GRPOTrainer`.
        callbacks: see `Trainer`; they see the leader's steps, and the logs of all agents.
        optimizers: (optimizer class, arguments) for all, or a list with such a pair or an (optimizer, scheduler) for
            each agent.
        quantization_configs: one for all or one per agent.
        peft_configs: one for all or one per agent, None for full training.
        agent_names: names in logs and folders; by default from the models' ids.

    Attributes:
        prompt_form: saved with every agent, with its own stop texts and template arguments; `hacpo evaluate` asks in
            it. By default the prompts of the data set as they are; set it where a template made them of problems, so
            that other problems can be put into it: `trainer.prompt_form = make_form("chat")`.
        last_checkpoint: the newest folder from which the running or interrupted run can be resumed, or None.

    Raises:
        ValueError: for what cannot work, before any weights are loaded.
    """

    def __init__(
        self,
        models: list[Any],
        reward_funcs: Any,
        args: HACPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_classes: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Any = None,
        quantization_configs: Any = None,
        peft_configs: Any = None,
        agent_names: list[str] | None = None,
        *,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ):
        check_versions()
        hush_renamed()
        refuse(tools=tools, rollout_func=rollout_func, environment_factory=environment_factory)
        models = list(models) if isinstance(models, (list, tuple)) else [models]
        models = [os.fspath(model) if isinstance(model, os.PathLike) else model for model in models]
        args = HACPOConfig("hacpo_output") if args is None else args
        if not isinstance(args, HACPOConfig):
            raise TypeError(
                f"args must be a HACPOConfig, not {type(args).__name__}; it takes GRPOConfig's arguments, too."
            )
        reward_funcs = resolve_rewards(reward_funcs, args)
        names = resolve_names(models, agent_names)
        args.check_agents(names)
        warn_if_alone(names, args)
        configs = [args.for_agent(name, leader=i == 0, index=i) for i, name in enumerate(names)]
        count = len(models)
        adapters = resolve_peft_configs(peft_configs, models, names)
        quantizations = per_agent(quantization_configs, count, "quantization_configs")
        check_fsdp(configs, adapters, quantizations, optimizers)
        optimizers = resolve_optimizers(optimizers, count)
        if args.offload_inactive_agents:
            check_offload(configs, quantizations)
        repositories = check_sharing(models, names, args, configs, adapters)
        check_models(models, names, configs, adapters)
        tokenizers = load_tokenizers(
            models, per_agent(processing_classes, count, "processing_classes"), names, configs
        )
        check = functools.partial(check_dataset, tokenizers=tokenizers, names=names, configs=configs, models=models)
        train_dataset = check(train_dataset)
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: check(data, evaluation=True) for name, data in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_dataset = check(eval_dataset, evaluation=True)
        if args.max_rounds > 0:
            for agent_args in configs:
                agent_args.max_steps = args.max_rounds * args.updates_per_round(count)
        self.agents: list[HACPOAgent] = [self]
        self.capability = CapabilityTracker(
            count,
            args.capability_window,
            args.capability_metric,
            ratio_bounds=tuple(args.capability_ratio_bounds),
        )
        self.round_rewards: list[float] = [math.nan] * count  # mean reward of every agent in the running round
        self._skip_epochs = 0
        self.finished_passes = 0  # over the prompts
        self.pass_began = 0  # the update at which the running pass began
        self._step_ended: float | None = None
        self._logged_timings: list[dict[str, float]] = [{} for _ in names]
        self._waiting: set[str] = set()
        self._evaluated_before: list[dict[str, Any]] = []  # the log of what happened before the running `train()`
        self._logged_in_training: int | None = None  # entries of the log at the end of the last `train()`
        self._checkpoint_dir: str | None = None
        self.last_checkpoint: str | None = None
        self._eval_prefix = ""
        self._peer_evaluations: dict[str, dict[str, float]] = {}
        is_text = isinstance(next(iter(train_dataset))["prompt"], str)
        self.prompt_form = PromptForm("plain" if is_text else "chat", stop=args.stop_texts or ())
        self.card_details: dict[str, Any] = {}  # what cards say beyond what is known, see `create_model_card`
        self.publisher = Publisher(args.output_dir, names, repositories, configs)
        if args.push_to_hub and args.process_index == 0:
            for name in names:
                self.publisher.open(name)

        turns = Turns()

        def arguments(i: int) -> dict[str, Any]:
            return {
                "train_dataset": train_dataset,
                "eval_dataset": eval_dataset,
                "processing_class": tokenizers[i],
                "optimizers": optimizers[i][0],
                "quantization_config": quantizations[i],
                "peft_config": adapters[i],
                "agent_name": names[i],
                "agent_index": i,
                "num_agents": count,
                "residency": residency,
                "turns": turns,
                "publisher": self.publisher,
            }

        for model, name in zip(models, names, strict=True):
            if not isinstance(model, str) and is_peft_model(model):
                use_default_adapter(model, name)
        models = load_adapters(models, adapters, quantizations, configs)
        quantizations = [q if isinstance(model, str) else None for q, model in zip(quantizations, models, strict=True)]
        residency = Residency(shared_tensors(models)) if args.offload_inactive_agents else None
        with _naming(names[0]):
            super().__init__(
                models[0],
                reward_funcs,
                configs[0],
                callbacks=callbacks,
                reward_processing_classes=reward_processing_classes,
                **arguments(0),
            )
        for i in range(1, count):
            with _naming(names[i]):
                # Reward models were loaded and prepared by the leader: all agents grade with the same objects
                peer = HACPOAgent(
                    models[i],
                    list(self.reward_funcs),
                    configs[i],
                    reward_processing_classes=list(self.reward_processing_classes),
                    **arguments(i),
                )
            peer.join_team(self)
            peer.remove_callback(DefaultFlowCallback)
            self.agents.append(peer)
            if args.should_save:
                with contextlib.suppress(OSError):  # it makes its folder long before there is something to put into it
                    os.rmdir(configs[i].output_dir)
        if self.accelerator.is_main_process:
            served = [agent for agent in self.agents if agent.use_vllm and agent.vllm_mode == "server"]
            warn_of_equal_samplers({agent.agent_name: agent.vllm_generation.vllm_client for agent in served})
        self.completions = None
        if args.log_completions:
            self.completions = CompletionTables(self.args, self.accelerator.is_main_process)
            for agent in self.agents:
                agent.log_completions = False  # TRL's own tables, one for each agent and log
        if self.is_deepspeed_enabled:
            plugins = {agent.agent_name: agent.args.deepspeed_plugin for agent in self.agents}
            AcceleratorState().deepspeed_plugins = plugins
            self.activate()
        for callback in (ProgressCallback, PrinterCallback):
            if self.pop_callback(callback) is not None:
                self.add_callback(RoundProgress(self._watched))
        self.add_callback(_PassCounter(self))
        check_trainable([agent.model for agent in self.agents], names)
        for agent, ((optimizer, _), optimizer_class) in zip(self.agents, optimizers, strict=True):
            check_optimizer(optimizer, agent.model, agent.agent_name)
            if optimizer_class is not None:
                agent.optimizer_cls_and_kwargs = optimizer_class

    @property
    def agent_names(self) -> list[str]:
        """The names of all agents, the leader's first."""
        return [agent.agent_name for agent in self.agents]

    # -- the loop -------------------------------------------------------------------------------------------------

    # HACPOAgent takes the loop out of `train`; the leader has it again
    _inner_training_loop = GRPOTrainer._inner_training_loop

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """See `Trainer.train`. A resumed run continues exactly.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest in `output_dir`.
            **kwargs: see `Trainer.train`.

        Raises:
            ValueError: when the checkpoint is not whole or is one of other agents.
            KeyboardInterrupt: after Ctrl-C, when the threads of the agents have ended. `last_checkpoint` is where to
                resume.
        """
        self.last_checkpoint = None
        self._skip_epochs = self.finished_passes = self.pass_began = 0
        self._step = 0
        self._waiting.clear()
        self.model_wrapped = self.model  # an engine of an earlier run cannot be prepared again
        if resume_from_checkpoint:
            resume_from_checkpoint = find_checkpoint(resume_from_checkpoint, self.args)
            state = check_checkpoint(resume_from_checkpoint, self._team_state())
            self.last_checkpoint = resume_from_checkpoint
            self.capability.load_state_dict(state.capability)
            for agent, share in zip(self.agents, state.outside_shares, strict=False):
                agent.outside_share = share
            self._skip_epochs = self._finished_epochs(state.global_step)
            self.finished_passes, self.pass_began = state.prompts_seen
            if state.global_step >= self._total_steps():
                return self._load_finished(resume_from_checkpoint, state.global_step)
        if self.completions is not None:
            self.completions.begin_run(state.global_step // self.updates_per_round if resume_from_checkpoint else 0)
        self._write_run_file()
        # The loop begins an empty log, or one with a checkpoint's. What was evaluated before the run belongs to it
        before = self.state.log_history[self._logged_in_training or 0 :]
        self._evaluated_before = [] if resume_from_checkpoint else [{**entry, "step": 0} for entry in before]
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self._logged_in_training = len(self.state.log_history)
        self.save_state()
        return result

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """See `TeamLog.evaluate`. What is evaluated before and after `train()` stands in the run's log as well."""
        metrics = super().evaluate(*args, **kwargs)
        if self._logged_in_training is not None and not self.is_in_train:
            self.save_state()
        return metrics

    def hyperparameter_search(self, *args, **kwargs):
        """Not supported.

        Raises:
            ValueError: always, with what works instead.
        """
        raise ValueError(
            "hyperparameter_search is not supported: it builds one model anew for every trial by model_init, and a "
            "team has several. Build a HACPOTrainer from the models' paths for every trial, and compare "
            "trainer.evaluate()['eval_reward'] after trainer.train()."
        )

    def _write_run_file(self) -> None:
        """Who trains on what, for `hacpo report`."""
        if not self.args.should_save:
            return
        run = {
            "agents": self.agent_names,
            "models": [get_config_model_id(agent.model.config) for agent in self.agents],
            "method": self.args.method,
            "shares_rollouts": self.args.shares_rollouts,
            "settings": self.args.to_sanitized_dict(),
        }
        os.makedirs(self.args.output_dir, exist_ok=True)
        with open(os.path.join(self.args.output_dir, RUN_FILE), "w", encoding="utf-8") as file:
            json.dump(run, file, indent=2, default=str)

    def _steps_per_epoch(self) -> int | None:
        """Updates of one pass over the prompts; None for a stream, which has no length."""
        if not isinstance(self.train_dataset, Dataset):
            return None
        rounds = len(self.train_dataset) // (self.args.generation_batch_size // self.num_generations)
        return rounds * self.updates_per_round

    def _finished_epochs(self, global_step: int) -> int:
        steps = self._steps_per_epoch()
        return 0 if steps is None else global_step // steps

    def _total_steps(self) -> float:
        if self.args.max_steps > 0:
            return self.args.max_steps
        steps = self._steps_per_epoch()
        return math.inf if steps is None else math.ceil(self.args.num_train_epochs * steps)

    def _load_finished(self, checkpoint: str, global_step: int) -> TrainOutput:
        """A run that is over: its agents are loaded, nothing is trained. `Trainer.train` would take a step more."""
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(f"{checkpoint!r} is of a finished run: load its agents' folders, or raise max_rounds.")
        warnings.warn(f"{checkpoint!r} is of a finished run: its agents are loaded, nothing is trained.", stacklevel=3)
        for agent in self.agents:
            HACPOAgent._load_from_checkpoint(agent, self._folder(checkpoint, agent.agent_name))
        self.state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        return TrainOutput(global_step, math.nan, {})

    @property
    def finished_rounds(self) -> int:
        """Rounds that the run has behind it."""
        return self.state.global_step // self.updates_per_round

    @property
    def updates_per_round(self) -> int:
        """Optimizer updates of the leader in one round."""
        return self.args.updates_per_round(self.num_agents)

    def get_train_dataloader(self):
        # A round has as many micro-batches for every source, and all of them are taken from the same prompts
        iterations = self.num_iterations
        self.num_iterations = iterations * self.args.updates_factor(self.num_agents)
        try:
            return super().get_train_dataloader()
        finally:
            self.num_iterations = iterations

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        if self.shuffle_dataset:
            for _ in range(self._skip_epochs):  # the orders of the epochs that a resumed run has behind it
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epoch, steps = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None and self._steps_per_epoch() is None and not self.args.ignore_data_skip:
            # A stream has no length: Trainer takes all of the run for one pass
            epoch = self.finished_passes
            steps = (self.state.global_step - self.pass_began) * self.args.gradient_accumulation_steps
        return epoch, steps

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        self.state.log_history[:0] = self._evaluated_before
        result = super()._prepare_for_training(
            max_steps, train_dataloader, self._folder(resume_from_checkpoint, self.agent_name)
        )
        rounds = max_steps / self.updates_per_round
        for peer in self.agents[1:]:
            updates = math.ceil(rounds * peer.args.updates_per_round(self.num_agents))
            peer.make_ready(updates, self._folder(resume_from_checkpoint, peer.agent_name))
        return result

    @staticmethod
    def _folder(checkpoint: str | None, name: str) -> str | None:
        return None if checkpoint is None else os.path.join(checkpoint, name)

    def training_step(self, model, inputs, num_items_in_batch=None):
        position = self._step % self.steps_per_round
        if position == 0:
            self._start_round(inputs)
            if self.residency is not None:  # one after the other: the device holds one agent
                for peer in self.agents[1:]:
                    peer.run_until(peer.steps_per_round)
        loss = super().training_step(model, inputs, num_items_in_batch)
        for peer in self.agents[1:]:
            peer.run_until((position + 1) * peer.steps_per_round // self.steps_per_round)
        self._step_ended = time.perf_counter()
        return loss

    def _start_round(self, inputs: list[dict[str, Any]]) -> None:
        if self.completions is not None:
            self.completions.begin_round(inputs)
            for agent in self.agents:
                agent._logs["extra"].clear()  # of an evaluation, or of the round before
        if self.residency is None:
            rollouts = self.turns.run([functools.partial(agent.sample, inputs) for agent in self.agents])
        else:  # handing the turn on would bring an agent's states to the device and back once more
            rollouts = [agent.sample(inputs) for agent in self.agents]
        generations = self.num_generations
        rewards = torch.stack([rollout.rewards for rollout in rollouts]).view(self.num_agents, -1, generations)
        self.capability.update(rewards)
        self.round_rewards = rewards.flatten(1).nanmean(1).tolist()
        self._check_max_reward(rewards)

        # each (N learners, N sources, B * G)
        advantages, weights, taken = (part.flatten(2) for part in self._signal(rewards))
        advantages = torch.where(taken, advantages, 0.0)
        together = (0, 2) if self.method.pools_rewards else (2,)
        self._differing = rewards_differ(rewards, together).double().mean().item()
        self._with_advantage = _with_advantage(advantages)
        if self.completions is not None:
            number = self.finished_rounds + 1
            logs = [agent._logs for agent in self.agents]
            self.completions.write(number, self.agent_names, rollouts, advantages.diagonal().T, logs)
        local = len(rollouts[0])
        start = self.accelerator.process_index * local
        here = slice(start, start + local)
        shares = []
        for k, agent in enumerate(self.agents):
            agent.open_round()
            found = agent.begin_round(rollouts, *(part[k][:, here] for part in (advantages, weights, taken)))
            for j in (j for j in range(self.num_agents) if j != k and self.method.trains_on_peers):
                if taken[k, j].any():
                    found[j, "coefficient"] = weights[k, j][taken[k, j]].mean().item()
                if self.method.selects:
                    found[j, "taken"] = taken[k, j].double().mean().item()
            shares.append(found)
        if self.method.views_peers:
            self._measure()
            for agent, found in zip(self.agents, shares, strict=True):
                found.update(agent.view_peers())
        solved = is_right(rewards).any(-1)  # (N, B)
        for agent, found in zip(self.agents, shares, strict=True):
            agent.plan_updates()
            self._log_round(agent, solved, found)
        self._measure()

    def _measure(self) -> None:
        """Finds what the ratios of the round compare with."""
        for agent in reversed(self.agents):  # the last one that sampled is awake still, the first is updated next
            peers = [peer for peer in self.agents if peer is not agent]
            agent.measure(set().union(*(peer.heard(agent.agent_index) for peer in peers)))

    def _signal(self, rewards: torch.Tensor) -> Signal:
        """What every learner takes from the round's graded responses, from rewards (N, B, G)."""
        args, number = self.args, self.finished_rounds
        pool = Pool(
            rewards,
            self.capability.capabilities,
            self.capability.reward_variances,
            ratio_bounds=self.capability.ratio_bounds,
            epsilon=args.advantage_epsilon,
            max_reward=max(args.max_reward, _largest(rewards)),
            generator=torch.Generator().manual_seed(args.seed * SEED_STRIDE + number),
        )
        return self.method.signal(pool)

    def _check_max_reward(self, rewards: torch.Tensor) -> None:
        if _largest(rewards) > self.args.max_reward:
            self._warn_once(
                f"A response got the reward {_largest(rewards):g}, above max_reward={self.args.max_reward:g}. Set "
                "max_reward to the largest reward that a response can have: it bounds the baseline."
            )

    def _watched(self) -> WatchedTeam:
        """What `RoundProgress` shows and judges."""
        capability = self.capability
        shares = self.args.shares_rollouts and self.num_agents > 1
        return WatchedTeam(
            names=self.agent_names,
            updates_per_round=self.updates_per_round,
            learning_rates=[agent.args.learning_rate for agent in self.agents],
            shares=shares,
            window=capability.window,
            loudest=1 / capability.ratio_bounds[0] if self.method.scales_peers() and shares else None,
            floor=capability.floor if capability.metric == "positive_rate" else -math.inf,
            signs=self.round_signs,
            timings=[agent.timings for agent in self.agents],
        )

    def round_signs(self) -> RoundSigns:
        """What the round that ends now tells, over all processes; all of them have to call it."""
        signs = RoundSigns(
            rewards=self.round_rewards,
            differing=self._differing,
            capabilities=self.capability.capabilities.tolist(),
            heard=[],
            with_advantage=self._with_advantage if self.args.shares_rollouts else [math.nan] * self.num_agents,
            own_ratio=[],
            kl=[],
            grad_norm=[],
        )
        for agent in self.agents:
            stats = agent.drain_statistics("round")
            own = stats.pop(agent.agent_index)
            quiet = [peer["no_gradient"] for peer in stats if "no_gradient" in peer]
            signs.heard.append(1 - sum(quiet) / len(quiet) if quiet else math.nan)
            signs.own_ratio.append(own.get("ratio_mean", math.nan))
            signs.kl.append(own.get("kl", math.nan))
            signs.grad_norm.append(max(map(float, agent.grad_norms), default=math.nan))
        return signs

    # -- the end of a round ---------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        if self._step_ended is not None:  # since then the loop has clipped the leader's gradients and stepped
            self.timings["updating"] += time.perf_counter() - self._step_ended
            self._step_ended = None
        self._wait_for_the_round()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._wait_for_the_round()  # a callback may have wished something meanwhile

    def _wait_for_the_round(self) -> None:
        """Puts off saving, evaluating and stopping until all agents have learned from the whole pool."""
        inside = self.state.global_step % self.updates_per_round != 0
        for flag in ("should_save", "should_evaluate", "should_training_stop", "should_epoch_stop"):
            if inside and getattr(self.control, flag):
                setattr(self.control, flag, False)
                self._waiting.add(flag)
            elif not inside and flag in self._waiting:
                setattr(self.control, flag, True)
                self._waiting.discard(flag)


class _PassCounter(TrainerCallback):
    """Counts the passes over the prompts: a stream has no length that tells them."""

    def __init__(self, trainer: HACPOTrainer):
        self.trainer = trainer

    def on_epoch_end(self, args, state, control, **kwargs):
        if not control.should_training_stop:  # else the pass may go on when the run is resumed
            self.trainer.finished_passes += 1
            self.trainer.pass_began = state.global_step


@contextlib.contextmanager
def _naming(agent: str) -> Iterator[None]:
    """Adds to an error whose agent's it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This happened while agent {agent!r} was built.")
        raise


def _with_advantage(advantages: torch.Tensor) -> list[float]:
    """(N,) share of the peers' responses that have an advantage, from advantages (N learners, N sources, R)."""
    peers = ~torch.eye(len(advantages), dtype=torch.bool)
    return [(a[mine] != 0).double().mean().item() for a, mine in zip(advantages, peers, strict=True)]


def _largest(rewards: torch.Tensor) -> float:
    finite = rewards[torch.isfinite(rewards)]
    return finite.max().item() if len(finite) else 0.0
