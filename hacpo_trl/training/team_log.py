"""What a team reports: one log of all agents, and their evaluation."""

import math

import torch

from .agent import HACPOAgent, Shares


class TeamLog(HACPOAgent):
    """Changes in HACPOAgent: its log and its evaluation are those of the whole team.

    A part of `HACPOTrainer`, which has `agents` and `capability`.
    """

    def _log_round(self, agent: HACPOAgent, solved: torch.Tensor, shares: Shares) -> None:
        """Logs a round: `solved` (N, B) tells which agents have a right response to which prompts."""
        metrics = agent._metrics["train"]
        failed = ~solved[agent.agent_index]
        metrics["all_wrong"].append(failed.double().mean().item())
        if failed.any() and self.num_agents > 1:
            metrics["rescuable"].append(solved[:, failed].any(0).double().mean().item())
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
            for key in ("loss", "grad_norm"):
                if any(value is not None and not math.isfinite(value) for value in metrics.get(key, ())):
                    agent._warn_once(
                        f"the {key} is not finite, and then its weights are not either. Go on from an earlier "
                        "checkpoint, with a lower learning_rate or a max_grad_norm."
                    )
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


def _nanmean(values: list[float]) -> float:
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
