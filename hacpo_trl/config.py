"""HACPOConfig: GRPOConfig with the paper's recipe as defaults and HACPO's own settings."""

import dataclasses
import difflib
import json
import math
import os
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from .capability import METRICS, CapabilityTracker
from .methods import METHODS, Method, register
from .methods.base import SEVERAL
from .objective import BASELINES, peer_clip_lower
from .sampling.vllm_settings import check_servers, server_of
from .setting_types import convert_fields, converted

# Settings that act only where peers' responses are trained on
SHARED_ONLY = (
    "peer_advantages",
    "rollout_order",
    "length_normalization",
    "peer_overflow",
    "skip_silent_responses",
    "screen_peers",
    "micro_batches",
    "source_logps",
)

# What all agents of a team have in common: the prompts, the groups and the clock of the run, and the process's state,
# of which accelerate has one.
_TEAM_FIELDS = frozenset(
    """output_dir agent_overrides method method_settings num_generations num_generations_eval generation_batch_size
    steps_per_generation num_iterations max_steps max_rounds num_train_epochs seed data_seed full_determinism
    logging_strategy logging_steps logging_first_step eval_strategy eval_steps eval_on_start save_strategy save_steps
    save_total_limit load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint
    reward_weights max_reward rollout_order capability_window capability_metric capability_ratio_bounds baseline
    advantage_epsilon peer_advantages capability_coefficient report_to shuffle_dataset remove_unused_columns
    log_completions offload_inactive_agents stop_texts max_prompt_length push_to_hub save_only_model eval_delay
    run_name vllm_server_urls bf16 fp16 tf32 use_cpu accelerator_config parallelism_config ddp_backend ddp_timeout fsdp
    fsdp_config local_rank""".split()
)

# TRL's names, of which transformers would warn, and transformers' later ones: in a copy it reads these alone
_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}

# Keys of `generation_kwargs` that change what is sampled but not the probabilities that the ratio is made of.
_SAMPLER_KEYS = frozenset(
    """temperature top_p top_k top_h min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty presence_penalty
    frequency_penalty encoder_repetition_penalty no_repeat_ngram_size bad_words_ids bad_words sequence_bias
    suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id min_length min_new_tokens min_tokens
    num_beams num_beam_groups penalty_alpha do_sample guidance_scale watermarking_config logit_bias logits_processors
    allowed_token_ids structured_outputs guided_decoding exponential_decay_length_penalty dola_layers
    num_return_sequences n seed""".split()
)


@dataclass
class HACPOConfig(GRPOConfig):
    """Settings of `HACPOTrainer`: all of TRL's `GRPOConfig`, with the defaults of arXiv 2603.02604, and HACPO's own.

    Defaults that differ from TRL's: `beta=0.001` with the plain k3 estimator (`use_bias_correction_kl=False`),
    `epsilon=3e-4` and `epsilon_high=4e-4` (for `method="grpo"` TRL's 0.2 stays), `loss_type="grpo"`,
    `importance_sampling_level="sequence"` (for `method="grpo"` "token"), `disable_dropout=True`,
    `lr_scheduler_type="constant"`, `num_train_epochs=1`, `max_completion_length=4096`, and `steps_per_generation` is
    twice `gradient_accumulation_steps`, so that an agent makes two updates on each agent's responses in a round. bf16
    is on where a GPU has it. With `load_best_model_at_end` the team's mean reward tells the best, not the loss.
    `log_completions` writes one table a round for the whole team, and prints only as many responses of each agent as
    `num_completions_to_print` says (TRL: all).

    A *round* is: every agent samples `num_generations` responses to each prompt of the generation batch, then every
    agent is updated on the responses of all. One round of N agents has
    `num_iterations * N * steps_per_generation / gradient_accumulation_steps` updates (without the factor N where
    nothing is shared, or where a method makes as many updates as alone). Saving, evaluating and stopping wait for the
    end of the round.

    Args:
        method: a name of `methods.METHODS`, see docs/methods.md, or an object of your own. Among them "hacpo"; "naive"
            (shared responses, plain pool mean, every response treated as the learner's own); "gspo" or "grpo" (the
            agents train side by side on the same prompts and share nothing; the loss is TRL's).
        method_settings: settings of the method by name; those of "hacpo" are the fields below.
        max_rounds: length of the run in rounds, instead of `max_steps`. -1: use `max_steps` or `num_train_epochs`.
        alpha: exponent of the damping sg(s)^alpha of peers' responses; 0 switches it off.
        peer_clip_delta: width of the peers' clip range [1 - delta, 1] at the first update; None (on the command line
            "none") leaves peers' ratios unclipped.
        peer_clip_step: by how much each update of a round narrows that range; 0 switches the tightening off.
        capability_window: rounds that the capability is averaged over.
        capability_metric: "positive_rate" (share of responses with a reward above 0) or "mean_reward".
        capability_ratio_bounds: clamp of the ratios P_k / P_j.
        baseline: "capability" (the paper), "pooled" (its ablation), "min_variance" or "own"; see
            `capability_aware_advantages`.
        capability_coefficient: scale a peer's response by P_j / P_k; False switches it off.
        peer_advantages: "all" (the paper) or "positive": a peer's response with a negative advantage teaches nothing.
        advantage_epsilon: added to the standard deviation of the advantage (TRL's own is fixed at 1e-4).
        max_reward: the largest reward that a response can have, for the baseline's guard.
        rollout_order: "own_first" (the paper: a round's first updates use the learner's own responses), "shuffled", or
            "merged": shuffled, and as many updates as without peers, each on N times the responses. A micro-batch then
            has up to N times `per_device_train_batch_size` rows.
        length_normalization: "own" (the paper: each mean log-probability over the tokens of its own tokenization) or
            "shared" (both sums over the learner's token count).
        peer_overflow: "truncate" or "drop" a peer's response that is longer, in the learner's tokens, than the
            learner's `max_completion_length`. `mask_truncated_completions` drops it, too.
        skip_silent_responses: leave out the forward and backward pass of responses that have no gradient because their
            advantage is 0: peers', and with `beta=0` and no entropy bonus own ones, too. The weights stay the same;
            False runs them all, for complete ratio statistics. A router loss (MoE) sees every token, so nothing is
            left out then.
        screen_peers: "on": before each update on peers' responses one pass without gradient finds those outside of
            the clip range, which are left out of the update; "off"; "auto": on when more than a quarter (a third
            without gradient checkpointing) were outside in the round before. Gradient and loss stay the same.
        micro_batches: "rows": an update is cut into micro-batches of equally many responses; "tokens": so that the
            largest one, with its padding, has as few tokens as possible; "auto": by tokens where that makes it smaller
            by more than a tenth. The loss is a sum over the update, so the gradient stays the same.
        skip_idle_updates: an update in which no response of any process has a gradient of the objective (all
            advantages 0, or all outside of the clip range) takes no optimizer step: neither the KL divergence alone
            nor the optimizer's momentum moves the weights. False: it steps, as TRL's GRPOTrainer does, and as always
            with DeepSpeed. Schedule, step count and logs go on both ways.
        max_prompt_length: prompts with more tokens than this, for any of the agents, are left out of the data sets for
            training and evaluation; a warning tells how many. None: a prompt that leaves a model no room for
            `max_completion_length` tokens behind it is an error.
        stop_texts: a response ends with the token that completes one of these texts, as with an end token, in training
            (transformers' generate or vLLM) and in its evaluations. The tokens up to there belong to the response;
            reward functions read the text before the stop text. `hacpo train` sets "\\nProblem:" for its plain prompts
            by itself; an empty list switches it off.
        sampling_batch_size: responses that transformers' generate samples at a time on one process; by default all of
            the round's. Smaller batches bound the key-value cache. vLLM batches by itself.
        offload_inactive_agents: park the states of all agents but the running one in the CPU's memory, so that the
            device holds about one agent at a time. Agents then update one after the other in a round; the results are
            the same. With DeepSpeed it needs ZeRO-3. After training, `agent.activate()` brings an agent back.
        vllm_server_urls: with `use_vllm=True` and `vllm_mode="server"`, one server for each agent, in their order. An
            agent's server can also be set by its `agent_overrides` (`vllm_server_base_url`, or `vllm_server_host` and
            `vllm_server_port`). Every agent syncs its weights on a port of its own: `vllm_group_port` plus its place
            in the team, unless its overrides set one.
        source_logps: "trainer": peers compare their ratio with the log-probabilities that the source's training
            weights give its responses; "sampler": with those that vLLM gave them while it sampled. Without
            `vllm_importance_sampling_correction` this saves a forward pass over the own responses, which then compare
            with the sampler, too; with it the own responses keep the trainer's, and the correction. A response with
            any log-probability that is not finite takes the trainer's, with a correction of 1.
        hub_base_model_id: the Hub id of the model that an agent started from, for its card and, with LoRA, for its
            adapter, where it was loaded from a local folder. For single agents in `agent_overrides`.
        agent_overrides: other settings for single agents, by name:
            `{"llama-3b": {"learning_rate": 5e-7, "chat_template_kwargs": {...}}}`. An agent's `model_init_kwargs` are
            added to the team's: `{"llama-3b": {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}}`.

    Raises:
        ValueError: for settings that cannot work, naming the nearest that can.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["agent_overrides", "method_settings"]

    # TRL's fields with the paper's defaults
    epsilon: float | None = field(
        default=None,
        metadata={"help": "Clip range below 1 of own responses, by default 3e-4 (GSPO), for method 'grpo' 0.2."},
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={"help": "Clip range above 1 of own responses, by default 4e-4 (GSPO), for method 'grpo' `epsilon`."},
    )
    beta: float | None = field(
        default=None,
        metadata={
            "help": "Weight of the KL divergence of own responses from the reference; the method's by default, e.g. 0."
        },
    )
    use_bias_correction_kl: bool = field(
        default=False, metadata={"help": "Multiply the KL divergence by the importance ratio (TRL's default is True)."}
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Switch dropout off: its noise in the ratio is far wider than the clip range."}
    )
    loss_type: str = field(
        default="grpo", metadata={"help": "Only 'grpo' works: the mean over sequences, whatever their length."}
    )
    importance_sampling_level: str = field(
        default="sequence",
        metadata={"help": "Follows from `method`: 'token' for 'grpo', else 'sequence'; nothing to set."},
    )
    max_completion_length: int = field(
        default=4096,
        metadata={"help": "Longest response, own or a peer's, in the tokens of the agent that samples or reads it."},
    )
    num_train_epochs: float = field(
        default=1.0, metadata={"help": "Passes over the training prompts, unless `max_rounds` or `max_steps` is set."}
    )
    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "Course of the learning rate over the run; 'constant' as in the paper."}
    )

    # Fields that do something else here than TRL's help says
    steps_per_generation: int | None = field(
        default=None,
        metadata={"help": "Micro-batches of own responses in a round, by default 2 x gradient_accumulation_steps."},
    )
    log_completions: bool = field(
        default=False,
        metadata={"help": "Keep a Parquet table of all agents' responses of every round, and print some of them."},
    )

    # HACPO's own
    method: str = field(
        default="hacpo",
        metadata={
            "help": "'hacpo', 'naive', 'gap', 'graft', 'sgt', 'luffy', 'sapo', 'f_tis' or 'xgrpo', or alone: "
            "'gspo', 'grpo'.",
            "choices": tuple(METHODS),
        },
    )
    method_settings: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Settings of the method by name, e.g. {"floor": 0.7} (JSON on the command line).'},
    )
    max_rounds: int = field(
        default=-1, metadata={"help": "Length of the run in rounds, instead of `max_steps`; -1: no limit."}
    )
    alpha: float = field(
        default=1.0, metadata={"help": "Exponent of the factor that damps peers' responses of low ratio; 0: off."}
    )
    peer_clip_delta: float | str | None = field(
        default=0.2,
        metadata={"help": "Width of the peers' clip range [1 - delta, 1] at a round's first update; 'none': no clip."},
    )
    peer_clip_step: float = field(
        default=0.025,
        metadata={"help": "By how much every update of a round narrows the peers' clip range; 0: not at all."},
    )
    capability_window: int = field(
        default=5, metadata={"help": "Number of last rounds that an agent's capability P is the mean of."}
    )
    capability_metric: str = field(
        default="positive_rate",
        metadata={
            "help": "What P is: 'positive_rate', the share of rewards above 0, or 'mean_reward'.",
            "choices": METRICS,
        },
    )
    capability_ratio_bounds: list[float] = field(
        default_factory=lambda: [0.1, 10.0],
        metadata={"help": "Smallest and largest value of the ratio of two agents' P."},
    )
    baseline: str = field(
        default="capability",
        metadata={
            "help": "What a reward is compared with: 'capability' (eq. 5), 'pooled' (w = 1), 'min_variance' or 'own'.",
            "choices": BASELINES,
        },
    )
    capability_coefficient: bool = field(
        default=True, metadata={"help": "Scale what a peer's response teaches by P of the peer / P of the learner."}
    )
    peer_advantages: str = field(
        default="all",
        metadata={
            "help": "'all', or 'positive': learn nothing from peers' responses with a negative advantage.",
            "choices": ("all", "positive"),
        },
    )
    advantage_epsilon: float = field(
        default=1e-6, metadata={"help": "Added to the standard deviation that the advantage is divided by."}
    )
    max_reward: float = field(
        default=1.0,
        metadata={"help": "The most that a response can earn; a baseline above it is replaced by the learner's mean."},
    )
    rollout_order: str = field(
        default="own_first",
        metadata={
            "help": "'own_first': updates on own responses first; 'shuffled': all mixed; 'merged': in fewer updates.",
            "choices": ("own_first", "shuffled", "merged"),
        },
    )
    length_normalization: str = field(
        default="own",
        metadata={
            "help": "'own': every mean log-probability over its own tokens; 'shared': over the learner's tokens.",
            "choices": ("own", "shared"),
        },
    )
    peer_overflow: str = field(
        default="truncate",
        metadata={
            "help": "'truncate' or 'drop' a peer's response longer than the learner's `max_completion_length`.",
            "choices": ("truncate", "drop"),
        },
    )
    skip_silent_responses: bool = field(
        default=True,
        metadata={"help": "Spare the passes over responses without a gradient; the weights stay the same."},
    )
    screen_peers: str = field(
        default="auto",
        metadata={
            "help": "Find and leave out peers' responses without gradient: 'on', 'off' or, where it pays, 'auto'.",
            "choices": ("auto", "on", "off"),
        },
    )
    micro_batches: str = field(
        default="auto",
        metadata={
            "help": "Cut updates into micro-batches by 'rows' or 'tokens'; 'auto': by tokens where rows differ much.",
            "choices": ("auto", "rows", "tokens"),
        },
    )
    skip_idle_updates: bool = field(
        default=True,
        metadata={"help": "Take no optimizer step in an update in which no response has a gradient (TRL does)."},
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={"help": "Leave out prompts that have more tokens than this for any of the agents."},
    )
    stop_texts: list[str] | None = field(
        default=None,
        metadata={"help": "Texts that end a response, as an end token does; hacpo train has some for plain prompts."},
    )
    sampling_batch_size: int | None = field(
        default=None,
        metadata={"help": "Responses that generate samples at a time without vLLM, by default all of a round's."},
    )
    offload_inactive_agents: bool = field(
        default=False, metadata={"help": "Park the states of agents that are not running in the CPU's memory."}
    )
    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={"help": "Address of one vLLM server for each agent, in their order, e.g. http://localhost:8000."},
    )
    source_logps: str = field(
        default="trainer",
        metadata={
            "help": "Whose log-probabilities peers compare with: the source's 'trainer' or 'sampler' (vLLM).",
            "choices": ("trainer", "sampler"),
        },
    )
    hub_base_model_id: str | None = field(
        default=None, metadata={"help": "Hub id of the model that an agent started from, if loaded from a folder."}
    )
    agent_overrides: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Other settings for single agents, by name (JSON on the command line)."}
    )

    @property
    def shares_rollouts(self) -> bool:
        """Whether the agents learn from each other's responses."""
        return METHODS[self.method].trains_on_peers

    @property
    def order(self) -> str:
        """How responses are dealt out to updates: the method's own order, or `rollout_order`."""
        return METHODS[self.method].order or self.rollout_order

    def build_method(self) -> Method:
        """The method with its settings.

        Raises:
            ValueError: for settings that it does not have, or that cannot work.
        """
        method, settings = METHODS[self.method], dict(self.method_settings or {})
        try:
            for name in settings.keys() & method.__dataclass_fields__.keys():
                settings[name] = converted(method, name, settings[name])
        except ValueError as error:
            raise ValueError(f"method_settings of {self.method!r}: {error}") from None
        return method.from_settings(settings, self)

    def updates_factor(self, num_agents: int) -> int:
        """How many times the updates on own responses a pass over a round has."""
        return num_agents if self.shares_rollouts and self.order in SEVERAL else 1

    @property
    def rows_per_round(self) -> int:
        """Own responses of an agent in one round on one process."""
        return self.per_device_train_batch_size * self.steps_per_generation

    def rows_factor(self, num_agents: int) -> int:
        """How many times the responses of an update on own responses an update has."""
        merged = METHODS[self.method].order is None and self.rollout_order == "merged"
        return num_agents if self.shares_rollouts and merged else 1

    def rows_per_update(self, num_agents: int) -> int:
        """Responses of an agent's update on one process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.rows_factor(num_agents)

    def updates_per_round(self, num_agents: int) -> int:
        """Optimizer updates of an agent in one round."""
        own = self.num_iterations * self.steps_per_generation // self.gradient_accumulation_steps
        return own * self.updates_factor(num_agents)

    def __post_init__(self):
        if isinstance(self.method, type) and issubclass(self.method, Method):
            raise ValueError(f"method is the class {self.method.__name__}; pass an object: {self.method.__name__}().")
        if isinstance(self.method, Method):  # a user's own: from now on known by its name
            if self.method_settings:
                raise ValueError("method_settings and a method object are both given: put them into the object.")
            own = self.method
            register(type(own))
            fields = (f.name for f in dataclasses.fields(own) if f.name not in own.config_fields)
            self.method, self.method_settings = own.name, {name: getattr(own, name) for name in fields}
        convert_fields(self)
        self._resolve_method()
        if self.bf16 is None:  # TRL's default is True everywhere
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model, self.greater_is_better = "reward", True  # of the team, in evaluation
        for old, new in _RENAMED.items():
            if getattr(self, new, self) is None:
                setattr(self, new, getattr(self, old))
        self._check_numbers()
        self._check_method()
        if self.generation_batch_size is None and self.steps_per_generation is None:
            self.steps_per_generation = 2 * self.gradient_accumulation_steps
        try:
            super().__post_init__()
        except ValueError as error:
            if "by num_generations" in str(error):
                raise ValueError(self._generations_message()) from error
            raise
        self._check_clipping()
        self._check_supported()
        self._check_batches()
        self._check_sampler()
        self._warn_of_idle_settings()

    # -- checks ---------------------------------------------------------------------------------------------------

    def _resolve_method(self) -> None:
        """Fills in what depends on the method."""
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; use one of {', '.join(METHODS)}.")
        method = METHODS[self.method]
        low, high = method.clip_range
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon if self.epsilon is not None and low == high else high
        if self.epsilon is None:
            self.epsilon = low
        if self.beta is None:
            self.beta = method.beta
        self._read_mapping("method_settings", "settings of the method to values", '{"floor": 0.7}')

    def _read_mapping(self, name: str, what: str, example: str) -> None:
        """Reads a setting that is a dict or JSON. (What begins with a brace the argument parser has read already.)"""
        value = getattr(self, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name} is not valid JSON: {error}. Write e.g. '{example}'.") from None
            setattr(self, name, value)
        if not isinstance(value, (dict, type(None))):
            raise ValueError(f"{name}={value!r} must map {what}, e.g. {example}.")

    def _check_numbers(self) -> None:
        least = {
            "num_generations": 2,
            "num_iterations": 1,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "max_completion_length": 1,
        }
        for name, smallest in least.items():
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= smallest):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, at least {smallest}.")
        if self.stop_texts is not None and (
            isinstance(self.stop_texts, str)
            or not all(isinstance(text, str) and text for text in self.stop_texts)
            or len(set(self.stop_texts)) < len(self.stop_texts)
        ):
            raise ValueError(
                f"stop_texts={self.stop_texts!r} must be a list of different texts that are not empty, e.g. "
                "['\\nProblem:']."
            )
        if self.max_prompt_length is not None and not self.max_prompt_length >= 1:
            raise ValueError(f"max_prompt_length={self.max_prompt_length} must be at least 1, or None.")
        if self.sampling_batch_size is not None and not self.sampling_batch_size >= 1:
            raise ValueError(f"sampling_batch_size={self.sampling_batch_size} must be at least 1.")
        for name in ("learning_rate", "alpha", "advantage_epsilon", "beta", "temperature"):
            if not math.isfinite(getattr(self, name)):
                example = _default(name) if _default(name) is not None else METHODS["hacpo"].beta
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number, e.g. {example:g}.")
        if not self.learning_rate >= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must not be negative.")
        if not isinstance(self.max_rounds, int):
            raise ValueError(f"max_rounds={self.max_rounds!r} must be a whole number.")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive; 1.0 samples from the model as it is.")
        self._read_mapping("agent_overrides", "names of agents to settings", '{"llama-3b": {"learning_rate": 5e-7}}')

    def _check_method(self) -> None:
        for f in dataclasses.fields(self):
            choices = f.metadata.get("choices") if f.name in HACPOConfig.__annotations__ else None
            if choices and f.name != "method" and getattr(self, f.name) not in choices:
                raise ValueError(f"{f.name}={getattr(self, f.name)!r} is unknown; use one of {', '.join(choices)}.")
        self.build_method()
        level = METHODS[self.method].level
        if level == "token":
            self.importance_sampling_level = level
        elif self.importance_sampling_level != level:
            raise ValueError(
                f"method={self.method!r} needs importance_sampling_level='sequence': the ratio of two tokenizations "
                "exists for whole responses only. Use method='grpo' for token-level ratios without sharing."
            )

    def _check_clipping(self) -> None:
        if isinstance(self.peer_clip_delta, str):
            raise ValueError(f"peer_clip_delta={self.peer_clip_delta!r} must be a number in [0, 1] or 'none'.")
        if self.peer_clip_delta is not None and not 0 <= self.peer_clip_delta <= 1:
            raise ValueError(
                f"peer_clip_delta={self.peer_clip_delta} must lie in [0, 1], or be 'none'; the paper's value is 0.2."
            )
        if self.beta < 0:
            raise ValueError(f"beta={self.beta:g} must not be negative; 0 leaves the reference out.")
        peer_clip_lower(0, self.peer_clip_delta or 0.0, self.peer_clip_step)
        if not self.alpha >= 0:
            raise ValueError(f"alpha={self.alpha} must not be negative; 0 switches the damping off.")
        if not (self.epsilon >= 0 and self.epsilon_high >= 0):
            raise ValueError(f"epsilon={self.epsilon} and epsilon_high={self.epsilon_high} must not be negative.")
        if not self.advantage_epsilon > 0:
            raise ValueError(f"advantage_epsilon={self.advantage_epsilon} must be positive, e.g. 1e-6.")
        if not self.max_reward > 0:
            raise ValueError(f"max_reward={self.max_reward} must be positive: the largest reward of a response.")
        if len(self.capability_ratio_bounds) != 2:
            raise ValueError(f"capability_ratio_bounds={self.capability_ratio_bounds} must be two numbers.")
        CapabilityTracker(
            1, self.capability_window, self.capability_metric, ratio_bounds=tuple(self.capability_ratio_bounds)
        )

    def _check_supported(self) -> None:
        """Refuses what TRL offers and shared rollouts cannot have."""
        sampler = {
            "top_p": self.top_p == 1.0,
            "top_k": self.top_k in (0, None),
            "min_p": self.min_p in (0.0, None),
            "repetition_penalty": self.repetition_penalty == 1.0,
            "vllm_structured_outputs_regex": self.vllm_structured_outputs_regex is None,
        }
        for name, fine in sampler.items():
            if not fine:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} changes the distribution that is sampled from but not the "
                    "probabilities that the importance ratio is made of, so the ratio would be wrong. Leave it at its "
                    "default; `temperature` is accounted for on both sides."
                )
        stops = sorted({"stop", "stop_strings", "include_stop_str_in_output"} & set(self.generation_kwargs or {}))
        if stops:
            raise ValueError(
                f"generation_kwargs may not set {', '.join(stops)}: what it ends would count as cut. Use stop_texts, "
                "a list of texts, which works with generate and vLLM."
            )
        clash = sorted(_SAMPLER_KEYS & set(self.generation_kwargs or {}))
        if clash:
            raise ValueError(
                f"generation_kwargs may not set {', '.join(clash)}: it changes the distribution that is sampled from "
                "but not the probabilities that the importance ratio is made of. Remove it (a temperature goes into "
                "`temperature`)."
            )
        only = {
            "loss_type": ("grpo", "HACPO's loss is the mean over sequences"),
            "delta": (None, "two-sided clipping is not part of HACPO; peers are clipped by `peer_clip_delta`"),
            "scale_rewards": ("group", "the advantage is scaled by the spread of the whole pool's rewards"),
            "multi_objective_aggregation": (
                "sum_then_normalize",
                "capabilities are rates of one reward; weigh several with `reward_weights`",
            ),
            "off_policy_mask_threshold": (None, "off-policy responses are handled by `peer_clip_delta` and `alpha`"),
            "top_entropy_quantile": (1.0, "the objective is one number a sequence, tokens cannot be left out of it"),
            "use_adaptive_entropy": (False, "use a fixed `entropy_coef`"),
            "torch_compile": (
                False,
                "a compiled model runs the updates and the plain one gives the log-probabilities that they compare "
                "with, and the two round differently, in bf16 by more than GSPO's clip range",
            ),
            "enable_jit_checkpoint": (False, "a checkpoint inside a round could not be continued; use `save_steps`"),
        }
        for name, (value, reason) in only.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported: {reason}. Use {name}={value!r}.")

        if self.use_transformers_continuous_batching and (self.bf16 or self.fp16):
            number = "bf16" if self.bf16 else "fp16"
            raise ValueError(
                f"use_transformers_continuous_batching=True with {number}=True is not supported: TRL would convert "
                f"the trained weights to {number} for good, and updates at small learning rates are lost in their "
                f"rounding. Sample with vLLM (use_vllm=True), or set {number}=False."
            )

    def _check_batches(self) -> None:
        rows = self.generation_batch_size
        if rows % self.num_generations:
            raise ValueError(self._generations_message())
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} must be a multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: an update may not mix two rounds. Try steps_per_generation="
                f"{_nearest_multiple(self.steps_per_generation, self.gradient_accumulation_steps)}."
            )
        if self.max_rounds == 0 or self.max_rounds < -1:
            raise ValueError(f"max_rounds={self.max_rounds} must be positive, or -1 for no limit.")
        if self.max_rounds > 0 and self.max_steps > 0:
            raise ValueError(
                f"max_rounds={self.max_rounds} and max_steps={self.max_steps} are both set. Keep max_rounds."
            )

    def _check_sampler(self) -> None:
        urls = self.vllm_server_urls
        if urls is not None:
            if not (self.use_vllm and self.vllm_mode == "server"):
                raise ValueError(
                    f"vllm_server_urls needs use_vllm=True and vllm_mode='server', not use_vllm={self.use_vllm} and "
                    f"vllm_mode={self.vllm_mode!r}."
                )
            if isinstance(urls, str) or not all(re.match(r"https?://[^/]", str(url)) for url in urls):
                raise ValueError(
                    f"vllm_server_urls={urls!r} must be a list of addresses, one for each agent, e.g. "
                    "['http://localhost:8000', 'http://localhost:8001']."
                )
        # A single agent's settings have no overrides: what they turn on is checked there
        if self.source_logps == "sampler" and not self.use_vllm and not self.agent_overrides:
            raise ValueError(
                "source_logps='sampler' needs use_vllm=True: only vLLM reports the log-probabilities that it sampled "
                "with. Use source_logps='trainer'."
            )

    def _generations_message(self) -> str:
        rows = self.generation_batch_size
        divisors = [d for d in range(2, rows + 1) if rows % d == 0]
        near = sorted(sorted(divisors, key=lambda d: (abs(d - self.num_generations), d))[:3])
        start = (
            f"num_generations={self.num_generations} does not divide the {rows} responses that an agent samples in a "
            "round (per_device_train_batch_size x steps_per_generation x processes); try "
        )
        if not near:
            return f"{start}more responses a round: steps_per_generation={self.num_generations}."
        return f"{start}num_generations={', '.join(map(str, near[:-1]))}{' or ' if near[:-1] else ''}{near[-1]}."

    def _warn_of_idle_settings(self) -> None:
        idle = idle_settings(self)
        changed = [name for name in idle if getattr(self, name) != _default(name)]
        if changed:
            verb = "has" if len(changed) == 1 else "have"
            warnings.warn(f"{', '.join(changed)} {verb} no effect with method={self.method!r}.", stacklevel=4)

    # -- one agent's settings -------------------------------------------------------------------------------------

    def check_agents(self, names: list[str]) -> None:
        """Checks what depends on the team, before a model is loaded.

        Raises:
            ValueError: for overrides of unknown agents or of settings that the team has in common, and for a
                `max_steps` that ends inside a round.
        """
        overrides = self.agent_overrides or {}
        unknown = [name for name in overrides if name not in names]
        if unknown:
            raise ValueError(f"agent_overrides names {', '.join(unknown)}; the agents are {', '.join(names)}.")
        known = {f.name for f in dataclasses.fields(self) if f.init}
        for name, values in overrides.items():
            if not isinstance(values, dict):
                raise ValueError(f"agent_overrides[{name!r}] must map settings to values, got {values!r}.")
            for key in values:
                if key not in known:
                    near = difflib.get_close_matches(key, known, n=1)
                    hint = f" Did you mean {near[0]!r}?" if near else ""
                    raise ValueError(f"agent_overrides[{name!r}] sets {key!r}, which HACPOConfig does not have.{hint}")
                if key in _TEAM_FIELDS:
                    raise ValueError(
                        f"agent_overrides[{name!r}] sets {key!r}, which all agents have in common. Set it for all."
                    )
        updates = self.updates_per_round(len(names))
        if self.max_steps > 0 and self.max_steps % updates:
            raise ValueError(
                f"max_steps={self.max_steps} ends inside a round: a round of {len(names)} agents has {updates} "
                f"updates. Try max_steps={_nearest_multiple(self.max_steps, updates)}, or max_rounds="
                f"{max(1, round(self.max_steps / updates))}."
            )
        if self.vllm_server_urls is not None and len(self.vllm_server_urls) != len(names):
            raise ValueError(
                f"vllm_server_urls lists {len(self.vllm_server_urls)} servers for {len(names)} agents "
                f"({', '.join(names)}); a server holds the weights of one agent, so give one for each."
            )
        check_servers(self, names)
        self._warn_of_a_closed_range(updates)

    def _warn_of_a_closed_range(self, updates: int) -> None:
        """Warns when the last updates of a round can learn nothing from peers."""
        if "peer_clip_delta" not in METHODS[self.method].config_fields.values() or not self.peer_clip_delta:
            return
        if self.order not in SEVERAL:
            return
        closed = sum(peer_clip_lower(m, self.peer_clip_delta, self.peer_clip_step) >= 1.0 for m in range(updates))
        if closed:
            warnings.warn(
                f"A round has {updates} updates, and in the last {closed} the peers' clip range is closed: they learn "
                f"nothing from peers. Make it close later: peer_clip_step={self.peer_clip_delta / updates:.2g}.",
                stacklevel=4,
            )

    def for_agent(self, name: str, *, leader: bool, index: int = 0) -> "HACPOConfig":
        """The settings of one agent: these with its overrides.

        An agent with another `per_device_train_batch_size` keeps the number of responses a round, and, unless its
        `gradient_accumulation_steps` is given too, the number of responses an update.

        Args:
            name: the agent's name.
            leader: the leader reports and keeps the team's output folder; a peer has a folder of its own inside.
            index: the agent's place in the team.

        Raises:
            ValueError: when an override cannot work, naming the agent.
        """
        overrides = (self.agent_overrides or {}).get(name, {})
        try:
            changes = {key: converted(type(self), key, value) for key, value in overrides.items()}
        except ValueError as error:
            raise ValueError(f"agent {name!r}: {error}") from None
        changes = {**server_of(self, name, index), **changes}
        for old, new in _RENAMED.items():
            if old in changes and hasattr(self, new):
                changes.setdefault(new, changes[old])
        size = changes.setdefault("per_device_train_batch_size", self.per_device_train_batch_size)
        if not (isinstance(size, int) and size >= 1):
            raise ValueError(
                f"agent {name!r}: per_device_train_batch_size={size!r} must be a whole number, at least 1."
            )
        if self.rows_per_round % size:
            raise ValueError(
                f"agent {name!r}: per_device_train_batch_size={size} does not divide the {self.rows_per_round} "
                f"responses of a round and process. Try {_nearest_divisor(self.rows_per_round, size)}."
            )
        per_update = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if "gradient_accumulation_steps" not in changes and per_update % size:
            raise ValueError(
                f"agent {name!r}: per_device_train_batch_size={size} does not divide the {per_update} responses of "
                f"an update. Try {_nearest_divisor(per_update, size)}, or give its gradient_accumulation_steps too."
            )
        changes.setdefault("gradient_accumulation_steps", per_update // size)
        changes["generation_batch_size"] = None
        steps = changes["steps_per_generation"] = self.rows_per_round // size
        accumulation = changes["gradient_accumulation_steps"]
        if not (isinstance(accumulation, int) and accumulation >= 1 and steps % accumulation == 0):
            raise ValueError(
                f"agent {name!r}: gradient_accumulation_steps={accumulation!r} does not divide the {steps} micro-"
                f"batches of its own responses in a round. Try {_nearest_divisor(steps, int(accumulation or 1))}."
            )
        changes["agent_overrides"] = None
        if isinstance(changes.get("model_init_kwargs"), dict):
            changes["model_init_kwargs"] = {**(self.model_init_kwargs or {}), **changes["model_init_kwargs"]}
        if self.hub_model_id is not None:
            changes.setdefault("hub_model_id", f"{self.hub_model_id}-{name}")
        if not leader:
            changes["output_dir"] = os.path.join(self.output_dir, name)
            changes["report_to"] = "none"
            changes["disable_tqdm"] = True
            changes["log_completions"] = False  # the leader writes one table for all
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what there is to warn of was said for the whole team
                return dataclasses.replace(self, **changes)
        except (ValueError, TypeError) as error:
            raise ValueError(f"agent {name!r}: {error}") from error


def idle_settings(args: HACPOConfig) -> list[str]:
    """Settings of methods that the chosen one does not read."""
    method = METHODS[args.method]
    read = set(method.config_fields.values())
    of_methods = {name for other in METHODS.values() for name in other.config_fields.values()}
    idle = of_methods if method.trains_on_peers else of_methods.union(SHARED_ONLY)
    if method.order is not None:
        idle.add("rollout_order")
    return [f.name for f in dataclasses.fields(args) if f.name in idle - read]


def _default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(HACPOConfig) if f.name == name)


def _nearest_multiple(value: int, step: int) -> int:
    return max(step, round(value / step) * step)


def _nearest_divisor(total: int, value: int) -> int:
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - value), d))
