"""HACPOTrainer: the leader of a team of agents."""

import contextlib
import functools
import inspect
import json
import math
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from huggingface_hub import CommitInfo
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ._contract import check_versions
from .agent import HACPOAgent, Shares
from .capability import CapabilityTracker
from .card import read_accuracies, write_card
from .checkpoint import atomic_folder, check_checkpoint, check_tokenizer, write_team_state
from .completions import CompletionTables
from .config import HACPOConfig
from .loading import share_bases, shared_tensors
from .objective import capability_aware_advantages
from .offload import Residency
from .page import RUN_FILE
from .progress import RoundProgress
from .rollouts import Rollout
from .sharing import Publisher, check_bases, check_sharing, push_checkpoint
from .team import (
    check_dataset,
    check_models,
    check_offload,
    load_tokenizers,
    per_agent,
    refuse,
    resolve_names,
    resolve_optimizers,
    resolve_peft_configs,
    warn_if_alone,
)
from .turns import Turns


class HACPOTrainer(HACPOAgent):
    """Changes in HACPOAgent: it is agent 0, and leads the others through rounds of sampling and updating.

    Its loop is that of `transformers.Trainer`. At the first step of a round every agent samples; then, with each of
    its own steps, it moves the peers on. Saving, evaluating and stopping wait for the end of the round.

    Args:
        models: one per agent: a Hub id, a folder, a model object or a PeftModel.
        reward_funcs: see `GRPOTrainer`: functions (sync or async), reward models, or a list of them. Every response
            is graded once.
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
        refuse(tools=tools, rollout_func=rollout_func, environment_factory=environment_factory)
        models = list(models) if isinstance(models, (list, tuple)) else [models]
        models = [os.fspath(model) if isinstance(model, os.PathLike) else model for model in models]
        args = HACPOConfig("hacpo_output") if args is None else args
        if not isinstance(args, HACPOConfig):
            raise TypeError(
                f"args must be a HACPOConfig, not {type(args).__name__}; it takes GRPOConfig's arguments, too."
            )
        if not reward_funcs:
            raise ValueError("reward_funcs is missing: responses have to be graded, e.g. by hacpo_trl.math_reward.")
        names = resolve_names(models, agent_names)
        args.check_agents(names)
        warn_if_alone(names, args)
        configs = [args.for_agent(name, leader=i == 0, index=i) for i, name in enumerate(names)]
        if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            raise ValueError(
                "FSDP is not supported: accelerate has one FSDP plugin a process, a team needs one for each agent. "
                "Use DeepSpeed: accelerate launch --config_file examples/configs/zero3.yaml ..."
            )
        count = len(models)
        adapters = resolve_peft_configs(peft_configs, models, names)
        quantizations = per_agent(quantization_configs, count, "quantization_configs")
        optimizers = resolve_optimizers(optimizers, count)
        if args.offload_inactive_agents:
            check_offload(configs, quantizations)
        repositories = check_sharing(models, names, args, configs, adapters)
        check_models(models, names, configs)
        tokenizers = load_tokenizers(
            models, per_agent(processing_classes, count, "processing_classes"), names, configs
        )
        check_dataset(train_dataset, tokenizers, names, configs)

        for eval_set in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
            if eval_set is not None:
                check_dataset(eval_set, tokenizers, names, configs, evaluation=True)
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
        self._step_ended: float | None = None
        self._logged_timings: list[dict[str, float]] = [{} for _ in names]
        self._waiting: set[str] = set()
        self._checkpoint_dir: str | None = None
        self._eval_prefix = ""
        self._peer_evaluations: dict[str, dict[str, float]] = {}
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

        models = share_bases(models, adapters, quantizations, configs)
        quantizations = [q if isinstance(model, str) else None for q, model in zip(quantizations, models, strict=True)]
        residency = Residency(shared_tensors(models)) if args.offload_inactive_agents else None
        reward_funcs = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
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
            peer.remove_callback(DefaultFlowCallback)
            self.agents.append(peer)
            if args.should_save:
                with contextlib.suppress(OSError):  # it makes its folder long before there is something to put into it
                    os.rmdir(configs[i].output_dir)
        self.completions = CompletionTables(self) if args.log_completions else None
        if self.is_deepspeed_enabled:
            plugins = {agent.agent_name: agent.args.deepspeed_plugin for agent in self.agents}
            AcceleratorState().deepspeed_plugins = plugins
            self.activate()
        for callback in (ProgressCallback, PrinterCallback):
            if self.pop_callback(callback) is not None:
                self.add_callback(RoundProgress(self))
        for agent, (_, optimizer_class) in zip(self.agents, optimizers, strict=True):
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
        """
        self._skip_epochs = 0
        self._step = 0
        self._waiting.clear()
        self.model_wrapped = self.model  # an engine of an earlier run cannot be prepared again
        if resume_from_checkpoint:
            resume_from_checkpoint, state = check_checkpoint(resume_from_checkpoint, self)
            self.capability.load_state_dict(state["capability"])
            self._skip_epochs = self._finished_epochs(state["global_step"])
            if state["global_step"] >= self._total_steps():
                return self._load_finished(resume_from_checkpoint, state["global_step"])
        if self.completions is not None:
            self.completions.begin_run(state["global_step"] // self.updates_per_round if resume_from_checkpoint else 0)
        self._write_run_file()
        result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        self.save_state()
        return result

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
        if self.is_deepspeed_enabled:
            raise ValueError(f"{checkpoint!r} is of a finished run: load its agents' folders, or raise max_rounds.")
        warnings.warn(f"{checkpoint!r} is of a finished run: its agents are loaded, nothing is trained.", stacklevel=3)
        for agent in self.agents:
            HACPOAgent._load_from_checkpoint(agent, self._folder(checkpoint, agent.agent_name))
        self.state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        return TrainOutput(global_step, math.nan, {})

    @property
    def updates_per_round(self) -> int:
        """Optimizer updates of the leader in one round."""
        return self.args.updates_per_round(self.num_agents)

    def get_train_dataloader(self):
        # A round has as many micro-batches for every source, and all of them are taken from the same prompts
        sources = self.num_agents if self.args.shares_rollouts else 1
        iterations = self.num_iterations
        self.num_iterations = iterations * sources
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

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
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
            self.completions.begin_round()
        if self.residency is None:
            rollouts = self.turns.run([functools.partial(agent.sample, inputs) for agent in self.agents])
        else:  # handing the turn on would bring an agent's states to the device and back once more
            rollouts = [agent.sample(inputs) for agent in self.agents]
        generations = self.num_generations
        rewards = torch.stack([rollout.rewards for rollout in rollouts]).view(self.num_agents, -1, generations)
        self.capability.update(rewards)
        self.round_rewards = rewards.flatten(1).nanmean(1).tolist()
        self._check_max_reward(rewards)

        advantages = self._advantages(rewards)  # (N learners, N sources, B * G)
        if self.completions is not None:
            self.completions.write(rollouts, advantages.diagonal().T)
        local = len(rollouts[0])
        start = self.accelerator.process_index * local
        coefficients = 1.0 / self.capability.ratios()  # (N learners, N sources)
        if self.args.method != "hacpo" or not self.args.capability_coefficient:
            coefficients = torch.ones_like(coefficients)
        for k, agent in enumerate(self.agents):
            agent.open_round()
            shares = agent.begin_round(rollouts, advantages[k][:, start : start + local], coefficients[k])
            self._log_round(agent, rollouts, shares)

    def _advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """(N learners, N sources, B * G) from rewards (N, B, G); without sharing only each agent's own are not 0."""
        args = self.args
        common = {"epsilon": args.advantage_epsilon, "max_reward": max(args.max_reward, _largest(rewards))}
        if args.shares_rollouts:
            advantages = capability_aware_advantages(
                rewards,
                self.capability.capabilities.to(rewards),
                ratio_bounds=self.capability.ratio_bounds,
                baseline="pooled" if args.method == "naive" else args.baseline,
                reward_variances=self.capability.reward_variances.to(rewards),
                **common,
            )
        else:
            advantages = rewards.new_zeros(self.num_agents, *rewards.shape)
            for k in range(self.num_agents):
                own = rewards[k : k + 1]
                advantages[k, k] = capability_aware_advantages(own, own.new_ones(1), **common)[0, 0]
        if args.peer_advantages == "positive" and args.shares_rollouts:
            own = torch.eye(self.num_agents, dtype=torch.bool)[:, :, None, None]
            advantages = torch.where(own, advantages, advantages.clamp(min=0))
        return advantages.flatten(2)

    def _check_max_reward(self, rewards: torch.Tensor) -> None:
        if _largest(rewards) > self.args.max_reward:
            self._warn_once(
                f"A response got the reward {_largest(rewards):g}, above max_reward={self.args.max_reward:g}. Set "
                "max_reward to the largest reward that a response can have: it bounds the baseline."
            )

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

    # -- logs -----------------------------------------------------------------------------------------------------

    def _log_round(self, agent: HACPOAgent, rollouts: list[Rollout], shares: Shares) -> None:
        metrics = agent._metrics["train"]
        metrics["capability"].append(self.capability.capabilities[agent.agent_index].item())
        for (source, name), value in shares.items():
            self._metrics["train"][f"{self._pair(source, agent.agent_index)}/{name}"].append(value)

    def _pair(self, source: int, learner: int) -> str:
        return f"pair/{self.agents[source].agent_name}->{self.agents[learner].agent_name}"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs all agents at once: "<agent>/<metric>", "pair/<source>-><learner>/<metric>", and the team's means.

        Args:
            logs: what the loop measured of the leader.
            start_time: see `Trainer.log`.
        """
        mode = "train" if self.model.training else "eval"
        gathered = self._gather_train_metrics(logs) if mode == "train" else self._gather_eval_metrics(logs)
        self._metrics[mode].clear()
        self._metrics[mode].update(gathered)
        super().log(logs, start_time)
        if self.is_in_train:
            self._wait_for_the_round()  # what callbacks wish at a log must wait, too

    def _gather_train_metrics(self, logs: dict[str, float]) -> dict[str, list[float]]:
        own = self._metrics["train"]
        pairs = {key: own.pop(key) for key in list(own) if key.startswith("pair/")}
        for key in ("loss", "grad_norm", "learning_rate"):
            if key in logs and "train_runtime" not in logs:
                own[key] = [logs.pop(key)]
        gathered: dict[str, list[float]] = {}
        sums: dict[str, list[float]] = {}
        seconds: dict[str, float] = {}
        for agent in self.agents:
            metrics = agent._metrics["train"]
            for j, stats in enumerate(agent.drain_statistics()):
                for key, value in stats.items():
                    if j == agent.agent_index:
                        metrics[key] = [value]
                    else:
                        pairs.setdefault(f"{self._pair(j, agent.agent_index)}/{key}", []).append(value)
            for key in ("loss", "reward"):
                if metrics.get(key):
                    sums.setdefault(key, []).append(_nanmean(metrics[key]))
            logged = self._logged_timings[agent.agent_index]
            for key, total in agent.timings.items():
                if total > logged.get(key, 0.0):
                    metrics[f"time/{key}"] = [total - logged.get(key, 0.0)]
                    seconds[key] = seconds.get(key, 0.0) + total - logged.get(key, 0.0)
            self._logged_timings[agent.agent_index] = dict(agent.timings)
            gathered.update({f"{agent.agent_name}/{key}": values for key, values in metrics.items() if values})
            if agent is not self:
                metrics.clear()
                agent.state.epoch = self.state.epoch
        team = {key: [_nanmean(values)] for key, values in sums.items()}
        team.update({f"time/{key}": [value] for key, value in seconds.items()})
        return {**team, **gathered, **pairs}

    def _gather_eval_metrics(self, logs: dict[str, float]) -> dict[str, list[float]]:
        prefix = self._eval_prefix
        own = {key: _nanmean(values) for key, values in self._metrics["eval"].items() if values}
        if f"eval_{prefix}loss" in logs:
            own["loss"] = logs[f"eval_{prefix}loss"]
        evaluations = {self.agent_name: own, **self._peer_evaluations} if own else {}
        gathered = {f"{prefix}{n}/{key}": [v] for n, values in evaluations.items() for key, v in values.items()}
        for key in ("loss", "reward"):
            values = [values[key] for values in evaluations.values() if values.get(key) is not None]
            if values:
                gathered[f"{prefix}{key}"] = [_nanmean(values)]
        return gathered

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluates every agent alone; see `Trainer.evaluate`.

        Returns:
            "eval_<agent>/<metric>" of all agents and "eval_reward", the team's mean. With several data sets the data
            set's name stands behind "eval_", and "eval_reward", "eval_loss" and "eval_<agent>/reward" are the means
            over the data sets, each of which counts the same.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # comes back for each of them
            means = {}
            for key in ("loss", "reward", *(f"{name}/reward" for name in self.agent_names)):
                values = [metrics.get(f"{metric_key_prefix}_{name}_{key}") for name in dataset]
                if any(value is not None for value in values):
                    means[f"{metric_key_prefix}_{key}"] = _nanmean(values)
            super().log(means)
            # Callbacks such as EarlyStoppingCallback look for the metric that tells the best model
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, means)
            return {**metrics, **means}
        self._peer_evaluations = {}
        for peer in self.agents[1:]:
            peer.state.epoch = self.state.epoch
            logged = peer.evaluate(eval_dataset, ignore_keys, "eval")
            self._peer_evaluations[peer.agent_name] = {
                key.removeprefix("eval_"): value
                for key, value in logged.items()
                if key.startswith("eval_") and not key.endswith(("runtime", "per_second"))
            }
        self._eval_prefix = metric_key_prefix.removeprefix("eval").lstrip("_")
        self._eval_prefix += "_" if self._eval_prefix else ""
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._eval_prefix, self._peer_evaluations = "", {}

    # -- saving and loading ---------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes every agent into `output_dir/<name>`, a folder that AutoModelForCausalLM and AutoTokenizer load.

        With `push_to_hub=True` it pushes them, too.

        Args:
            output_dir: by default the run's.

        Raises:
            ConnectionError: see `push_to_hub`.
        """
        output_dir = self.args.output_dir if output_dir is None else output_dir
        self._save_agents(output_dir, check_tokenizers=not _internal_call)
        if self.args.push_to_hub and not _internal_call and self.is_world_process_zero():
            self.publisher.push(self.agents, output_dir, commit_message="Model save")

    def _save_agents(self, output_dir: str, *, check_tokenizers: bool) -> None:
        for agent in self.agents:
            folder = os.path.join(output_dir, agent.agent_name)
            with atomic_folder(folder, self.accelerator) as unfinished:
                HACPOAgent.save_model(agent, unfinished, _internal_call=True)
                if self.is_world_process_zero():
                    write_card(self, agent, unfinished)
            if self.args.should_save and check_tokenizers:
                check_tokenizer(agent.processing_class, folder, agent.agent_name)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        *,
        license: str | None = None,
        language: str | list[str] | None = None,
        accuracies: Any = None,
    ) -> None:
        """Writes `output_dir/<name>/README.md` for every agent. Needs no network.

        What is given here is remembered for all cards that are written later, with the saved agents.

        Args:
            model_name: title of the cards, "<model_name>-<agent>"; by default the repository's name.
            dataset_name: ids on the Hub of the data; by default found out where the data set knows them.
            tags: further ones.
            license: of the agents, such as "apache-2.0"; by default none is named.
            language: codes, such as "en".
            accuracies: {agent: {benchmark: accuracy, or (before, after)}}, or a results file of `hacpo evaluate`.

        Raises:
            ValueError: for accuracies of agents that there are not, or that are no numbers.
        """
        if self._checkpoint_dir is not None:
            return  # the cards of a checkpoint are written with its agents
        self._note_details(
            model_name=model_name,
            dataset_name=dataset_name,
            tags=tags,
            license=license,
            language=language,
            accuracies=accuracies,
        )
        if self.is_world_process_zero():
            for agent in self.agents:
                folder = os.path.join(self.args.output_dir, agent.agent_name)
                os.makedirs(folder, exist_ok=True)
                write_card(self, agent, folder)

    def _note_details(self, **details: Any) -> None:
        if details.get("accuracies") is not None:
            details["accuracies"] = read_accuracies(details["accuracies"], self.agent_names)
        self.card_details.update({key: value for key, value in details.items() if value is not None})

    # -- the Hub --------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Opens the repository of every agent; see `Trainer.init_hf_repo`.

        Args:
            token: by default each agent's `hub_token`.
            private: whether new ones are private; by default each agent's `hub_private_repo`.

        Raises:
            ConnectionError: naming agent and repository when the Hub refuses.
        """
        for agent in self.agents:
            HACPOAgent.init_hf_repo(agent, token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ) -> list[CommitInfo] | list[Future]:
        """Saves every agent and pushes it, with a model card, to a repository of its own.

        The repository is `hub_model_id` with "-<agent>" behind it, or the agent's own `hub_model_id` in
        `agent_overrides`, or by default "<name of output_dir>-<agent>". What continues a run (optimizer, settings) is
        not pushed.

        Args:
            commit_message: of every agent's commit.
            blocking: whether to wait for the uploads.
            token: by default `hub_token`, or the one that `hf auth login` saved.
            revision: the branch, made where it is missing; by default `hub_revision`, or "main".
            private: whether new repositories are private; by default `hub_private_repo`.
            **kwargs: for the cards, see `create_model_card`.

        Returns:
            The commit of every agent; with `blocking=False` futures of them. Empty on other than the main process.

        Raises:
            ConnectionError: naming the agent, its repository and what was pushed before.
            ValueError: for an adapter on a base that nobody else can load, before anything is pushed.
        """
        _check_details(kwargs)
        check_bases(
            self.agent_names,
            [agent.base for agent in self.agents],
            [is_peft_model(agent.model) for agent in self.agents],
        )
        self._note_details(**kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.init_hf_repo(token, private)
        self._save_agents(self.args.output_dir, check_tokenizers=True)
        if not self.is_world_process_zero():
            return []
        return self.publisher.push(
            self.agents,
            self.args.output_dir,
            commit_message=commit_message,
            token=token,
            revision=revision,
            blocking=blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder):
        """Nothing yet: the checkpoint is not whole. `_save_checkpoint` pushes it."""

    def _finish_current_push(self):
        self.publisher.reap(wait=True)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial):
        return self._checkpoint_dir or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial):
        run_dir = self._get_output_dir(trial)
        folder = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        with atomic_folder(folder, self.accelerator) as unfinished:
            self._checkpoint_dir = os.path.dirname(unfinished)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._checkpoint_dir = None
            if self.state.best_model_checkpoint == unfinished:
                self.state.best_model_checkpoint = folder
            if self.args.should_save:
                self.state.save_to_json(os.path.join(unfinished, TRAINER_STATE_NAME))
                write_team_state(unfinished, self)
        if self.args.push_to_hub and self.is_world_process_zero():
            push_checkpoint(self, folder)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(self._folder(output_dir, self.agent_name))
        for peer in self.agents[1:]:
            folder = self._folder(output_dir, peer.agent_name)
            peer._save_optimizer_and_scheduler(folder)
            peer._save_scaler(folder)
            if self.args.should_save:
                peer.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))

    def _save_scaler(self, output_dir):
        super()._save_scaler(self._folder(output_dir, self.agent_name))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(self._folder(resume_from_checkpoint, self.agent_name), model)

    def _load_best_model(self):
        best = self.state.best_model_checkpoint
        for agent in self.agents:
            load = super()._load_best_model if agent is self else agent._load_best_model
            agent.state.best_model_checkpoint = self._folder(best, agent.agent_name)
            load()
        self.state.best_model_checkpoint = best


def _check_details(details: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(HACPOTrainer.create_model_card).parameters if name != "self"]
    unknown = sorted(details.keys() - set(known))
    if unknown:
        raise TypeError(f"push_to_hub does not know {', '.join(unknown)}; cards take {', '.join(known)}.")


@contextlib.contextmanager
def _naming(agent: str) -> Iterator[None]:
    """Adds to an error whose agent's it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This happened while agent {agent!r} was built.")
        raise


def _largest(rewards: torch.Tensor) -> float:
    finite = rewards[torch.isfinite(rewards)]
    return finite.max().item() if len(finite) else 0.0


def _nanmean(values: list[float]) -> float:
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
