"""What an agent samples with. generate() by the run's settings alone; vLLM's servers, asked together and checked."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import GenerationConfig

_SERVERS_MINUS_INFINITY = -9999.0  # JSON has no infinity, and this is what vLLM's server writes instead


@contextlib.contextmanager
def plain_generation_config(model: Any) -> Iterator[None]:
    """Hides a model's own sampling settings: generate() takes from them what its arguments leave open.

    A minimal probability, a penalty or a forced length would change what is sampled, and nothing would say so. The end
    tokens are among the arguments. Afterwards the model has its settings again, and is saved with them.

    Args:
        model: a model of transformers, or a PeftModel, which generates by the settings of its base.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    kept = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = kept


def connect(
    generation: Any,
    name: str,
    out_of_turn: Callable[[Callable[[], Any]], Any],
    *,
    needs_sampled_logprobs: bool = False,
) -> None:
    """Lets the other agents go on while an agent's server samples, and names both where the server fails.

    Every process hands the turn on at the same place, between the gathering of the prompts and the broadcast of the
    responses, so that collective operations keep one order on all of them.

    Args:
        generation: the agent's `VLLMGeneration` of `vllm_mode="server"`.
        name: of the agent.
        out_of_turn: runs a function while the other agents have their turn, and returns its result in this one's.
        needs_sampled_logprobs: whether the server has to report the log-probabilities that it samples by.

    Raises:
        ValueError: when they are needed and the server reports others.
    """
    if not generation.accelerator.is_main_process:
        generate = generation.generate

        @functools.wraps(generate)
        def generate_with_pause(*args, **kwargs):
            accelerator = generation.accelerator
            generation.accelerator = _PausingAccelerator(accelerator, lambda: out_of_turn(lambda: None))
            try:
                return generate(*args, **kwargs)
            finally:
                generation.accelerator = accelerator

        generation.generate = generate_with_pause
        return

    client = generation.vllm_client
    info = client.get_server_info()
    same = functools.partial(_check_instance, client, server_instance(info))
    generate_here, update_here = client.generate, client.update_named_params

    def generate_by_the_same(*args, **kwargs):
        answer = generate_here(*args, **kwargs)  # the client tries again while its server is away
        same()
        return answer

    def update_the_same(*args, **kwargs):
        same()  # a new server would not take part, and the transfer would never end
        return update_here(*args, **kwargs)

    named = functools.partial(_naming, name, client.base_url)
    client.generate = named("generate", lambda *a, **k: out_of_turn(functools.partial(generate_by_the_same, *a, **k)))
    client.update_named_params = named("update_named_params", update_the_same)
    client.reset_prefix_cache = named("reset_prefix_cache", client.reset_prefix_cache)
    if needs_sampled_logprobs:
        mode = info["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ValueError(
                f"agent {name!r}: source_logps='sampler' needs the log-probabilities that are sampled by, "
                f"but the server {client.base_url} runs with --logprobs-mode {mode}. Start it with --logprobs-mode "
                "processed_logprobs (hacpo serve does), or use source_logps='trainer'."
            )


def warn_of_equal_samplers(clients: Mapping[str, Any]) -> None:
    """Warns where the servers of two agents serve one model with one seed, which is vLLM's default.

    As long as the agents' weights are equal they would answer equal prompts with equal responses.

    Args:
        clients: the `VLLMClient` of every agent, by name.
    """
    seen: dict[tuple[str, int], str] = {}
    for name, client in clients.items():
        config = client.get_server_info()["model_config"]
        if "model" not in config or "seed" not in config:
            continue
        first = seen.setdefault((config["model"], config["seed"]), name)
        if first != name:
            warnings.warn(
                f"agents {first!r} and {name!r}: their servers serve {config['model']!r} with "
                f"the same seed, {config['seed']}, and would give both the same responses at first. Start them by "
                "hacpo serve, or with a --seed of its own for each.",
                stacklevel=4,
            )


def check_engine(model: nn.Module, name: str) -> None:
    """Checks that an engine in the trainer's process has left the trainer's own model as it was.

    Args:
        model: the trainer's, not wrapped.
        name: of the agent.

    Raises:
        ValueError: when vLLM has rebuilt its class, as it does where it runs an architecture by Transformers' code.
    """
    for module in model.modules():
        if any(base.__module__.split(".")[0] == "vllm" for base in type(module).__mro__):
            raise ValueError(
                f"agent {name!r}: vLLM has no implementation of {type(module).__name__} of its own. It "
                "has changed the class of Transformers for its purposes, in the whole process, and the trainer's "
                "model cannot run any more. Use a server: vllm_mode='server' and vllm_server_urls."
            )


class _PausingAccelerator:
    """An accelerator that hands the turn on when it is asked whether this is the main process.

    `VLLMGeneration.generate` asks once, right before the main process sends its request.
    """

    def __init__(self, accelerator: Any, pause: Callable[[], Any]):
        self._accelerator = accelerator
        self._pause = pause

    @property
    def is_main_process(self) -> bool:
        self._pause()
        return self._accelerator.is_main_process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def server_instance(info: dict[str, Any]) -> str | None:
    """What tells a server from one that was started after it at the same address; None when nothing does.

    Args:
        info: what the server says of its configuration.
    """
    if info.get("parallel_config", {}).get("_api_process_count", 1) != 1:
        return None  # each of the processes that answer has an id of its own
    return info.get("instance_id")


def _check_instance(client: Any, instance: str | None) -> None:
    if instance is not None and server_instance(client.get_server_info()) not in (instance, None):
        raise RuntimeError("it was started anew during the run and holds the weights of its start")


def _naming(agent: str, url: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with errors that name the agent and its server."""

    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(
                f"agent {agent!r}: its vLLM server {url} failed in {name}: {error}. All checkpoints of "
                "finished rounds are whole: start the server again, then a new run with "
                "trainer.train(resume_from_checkpoint=True)."
            ) from error

    return call


def usable_logprobs(logprobs: Sequence[Sequence[float | None]]) -> tuple[list[list[float]], int]:
    """A sampler's log-probabilities, with NaN for every token of a response that has any that is not finite.

    TRL takes NaN for "as the training weights have it", so such a response gets the correction 1.

    Args:
        logprobs: one list per response.

    Returns:
        The log-probabilities, and the number of responses that were set to NaN.
    """
    result, unusable = [], 0
    for values in logprobs:
        usable = all(v is not None and math.isfinite(v) and v > _SERVERS_MINUS_INFINITY for v in values)
        result.append(list(values) if usable else [math.nan] * len(values))
        unusable += not usable
    return result, unusable
