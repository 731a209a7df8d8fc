"""What a team leaves behind: folders of agents, model cards, repositories on the Hub, checkpoints."""

import inspect
import os
import shutil
from concurrent.futures import Future
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from ..hub.card import AgentFacts, TeamFacts, card_text, read_accuracies
from ..hub.publishing import Base, check_bases
from .agent import HACPOAgent
from .checkpoint import TeamState, atomic_folder, check_tokenizer, portrait


class TeamFiles(HACPOAgent):
    """Changes in HACPOAgent: what it saves and pushes is the whole team, a folder and a repository for each agent.

    A part of `HACPOTrainer`, which has `agents` and `publisher`.
    """

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
            self.publisher.push(self._bases(), output_dir, commit_message="Model save")

    def _save_agents(self, output_dir: str, *, check_tokenizers: bool) -> None:
        for agent in self.agents:
            folder = os.path.join(output_dir, agent.agent_name)
            with atomic_folder(folder, self.accelerator) as unfinished:
                HACPOAgent.save_model(agent, unfinished, _internal_call=True)
                if self.is_world_process_zero():
                    self._write_card(agent, unfinished)
                    self.prompt_form.for_agent(agent.args.chat_template_kwargs).save(unfinished)
                    if check_tokenizers:  # not in a checkpoint: a resumed run compares with the same start
                        shutil.rmtree(os.path.join(unfinished, "ref"), ignore_errors=True)
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
                self._write_card(agent, folder)

    def _write_card(self, agent: HACPOAgent, folder: str) -> None:
        facts = {
            other.agent_name: AgentFacts(
                name=other.agent_name,
                args=other.args,
                base=other.base,
                model=other.model,
                repository=other.hub_model_id,
                form=self.prompt_form.for_agent(other.args.chat_template_kwargs),
                rewards=other.reward_func_names,
            )
            for other in self.agents
        }
        team = TeamFacts(
            args=self.args,
            agents=list(facts.values()),
            rounds=self.finished_rounds,
            train_dataset=self.train_dataset,
            eval_sets=list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else [""],
            history=self.state.log_history,
            details=self.card_details,
        )
        with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as file:
            file.write(card_text(team, facts[agent.agent_name]))

    def _bases(self, strategy: str | None = None) -> dict[str, Base]:
        """What the agents started from, by name: all, or those whose `hub_strategy` it is."""
        return {agent.agent_name: agent.base for agent in self.agents if strategy in (None, agent.args.hub_strategy)}

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
            self._bases(),
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
                self._team_state().write(unfinished)
        if not self.args.save_only_model:
            self.last_checkpoint = folder
        if self.args.push_to_hub and self.is_world_process_zero():
            self.publisher.push(
                self._bases("every_save"),
                folder,
                commit_message=f"Training in progress, round {self.finished_rounds}, step {self.state.global_step}",
                blocking=False,
                background=True,
            )
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _team_state(self) -> TeamState:
        prompts = self.train_dataset
        return TeamState(
            agents=[portrait(agent.agent_name, agent.model, agent.processing_class) for agent in self.agents],
            method=self.args.method,
            global_step=self.state.global_step,
            updates_per_round=self.updates_per_round,
            prompts_seen=(self.finished_passes, self.pass_began),
            capability=self.capability.state_dict(),
            outside_shares=[agent.outside_share for agent in self.agents],
            resumable=not self.args.save_only_model,
            exact={
                "num_generations": self.num_generations,
                "prompts a round": self.args.generation_batch_size // self.num_generations,
                "prompts in train_dataset": len(prompts) if hasattr(prompts, "__len__") else None,
                "seed": self.args.seed,
                "processes": self.accelerator.num_processes,
            },
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
        if not self.is_fsdp_enabled:  # there it is called with the agent's folder, see `_prepare_for_training`
            resume_from_checkpoint = self._folder(resume_from_checkpoint, self.agent_name)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        best = self.state.best_model_checkpoint
        for agent in self.agents:
            load = super()._load_best_model if agent is self else agent._load_best_model
            agent.state.best_model_checkpoint = self._folder(best, agent.agent_name)
            load()
        self.state.best_model_checkpoint = best


def _check_details(details: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(TeamFiles.create_model_card).parameters if name != "self"]
    unknown = sorted(details.keys() - set(known))
    if unknown:
        raise TypeError(f"push_to_hub does not know {', '.join(unknown)}; cards take {', '.join(known)}.")
