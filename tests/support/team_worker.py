"""One rank of a run that the tests of several processes start; not a test itself.

    python tests/support/team_worker.py settings.json

Sampling is replaced by responses that depend on the prompt, the place in the group, the round and the agent only, and
the order of the rows is fixed, so that any number of processes sees the same data.
"""

import functools
import hashlib
import json
import os
import signal
import sys
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)
with open(sys.argv[1]) as file:
    SETTINGS = json.load(file)

import transformers.training_args
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from support.fake_vllm_server import FakeClient, FakeServer
from support.tiny_teams import config, dataset, digit_reward
from trl.generation import vllm_generation

import hacpo_trl.training.agent
from hacpo_trl import HACPOTrainer
from hacpo_trl.reporting.round_progress import RoundProgress
from hacpo_trl.training.offload import resident_bytes

if "fsdp" in SETTINGS:  # accelerate shards only where there are GPUs: the CPUs pass for them
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", **SETTINGS["fsdp"])
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True

_randperm = torch.randperm
torch.randperm = lambda n, *args, generator=None, **kwargs: (
    torch.arange(n) if generator is None else _randperm(n, generator=generator)
)


def sample(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
    """Pseudo-random responses that do not depend on how many processes there are."""
    number = self.state.global_step // self.args.updates_per_round(self.num_agents)
    first = self.accelerator.process_index * len(prompt_ids)
    responses = []
    for i, ids in enumerate(prompt_ids):
        key = f"{number} {self.agent_name} {(first + i) % num_generations} {list(ids)}"
        digest = hashlib.sha256(key.encode()).digest()
        length = 3 + digest[0] % (self.max_completion_length - 3)
        text = "".join("0123456789 +=;"[d % 14] for d in digest[1 : 1 + length])
        tokens = self._tokenizer(text)["input_ids"][: self.max_completion_length - 1]
        responses.append(tokens + [self.eos_token_ids[0]] if digest[31] % 3 else tokens)
    if SETTINGS.get("fail_on_rank") == self.accelerator.process_index:
        raise RuntimeError("this rank fails")
    if SETTINGS.get("kill") == f"sampling {number} {self.agent_name}":
        os.kill(os.getpid(), signal.SIGKILL)
    return responses, None


def servers(models, names):
    """Stand-ins for vLLM, of which none answers before all have been asked."""
    together = threading.Barrier(len(names), timeout=60)

    def before(name):
        together.wait()
        if SETTINGS["vllm"] == f"{name} fails":
            raise OSError("connection refused")

    FakeClient.servers = {
        f"http://{name}:8000": FakeServer(model, before=functools.partial(before, name))
        for model, name in zip(models, names, strict=True)
    }
    vllm_generation.VLLMClient = FakeClient
    vllm_generation.is_vllm_available = lambda *args, **kwargs: True


if SETTINGS.get("vllm"):
    servers(SETTINGS["models"], SETTINGS["names"])
else:
    hacpo_trl.training.agent.HACPOAgent._generate_single_turn = sample


def kill_points(trainer):
    """Dies by a signal between two agents' updates or in the middle of a save."""
    kill = SETTINGS.get("kill", "")
    peer = trainer.agents[1]
    if kill.startswith("updating"):
        update, number = peer._step_optimizer, int(kill.split()[1])

        def dying_update():
            update()
            if peer.state.global_step == number:
                os.kill(os.getpid(), signal.SIGKILL)

        peer._step_optimizer = dying_update
    if kill.startswith("saving"):
        save, number = peer._save_optimizer_and_scheduler, int(kill.split()[1])

        def dying_save(folder):
            if trainer.state.global_step == number:
                os.kill(os.getpid(), signal.SIGKILL)
            save(folder)

        peer._save_optimizer_and_scheduler = dying_save


def watch_memory(trainer):
    """Largest bytes of states on the device, as seen when an agent's gradients are full; and of its gradients then."""
    seen = {"peak": 0, "gradients": []}
    for agent in trainer.agents:
        clip = agent._clip_grad_norm

        def watched(model, agent=agent, clip=clip):
            seen["peak"] = max(seen["peak"], resident_bytes(trainer.agents))
            storages = {p.grad.untyped_storage().data_ptr() for p in agent.model.parameters() if p.grad is not None}
            buckets = {storage.data_ptr() for storage, _ in agent.buckets.sizes} if agent.buckets else set()
            seen["gradients"].append(storages in (buckets, set()))  # none where nothing was to learn
            return clip(model)

        agent._clip_grad_norm = watched
    return seen


def build(output_dir=SETTINGS["output_dir"], **changes):
    adapters = None
    if SETTINGS.get("lora"):
        adapters = [
            LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None for lora in SETTINGS["lora"]
        ]
    # DeepSpeed always steps, and all runs are compared with each other
    args = config(output_dir, **{"skip_idle_updates": False, **SETTINGS["config"], **changes})
    trainer = HACPOTrainer(
        SETTINGS["models"],
        digit_reward,
        args,
        dataset(16),
        agent_names=SETTINGS["names"],
        peft_configs=adapters,
    )
    trainer.remove_callback(RoundProgress)
    return trainer


def main():
    trainer = build()
    kill_points(trainer)
    memory = {} if "fsdp" in SETTINGS else watch_memory(trainer)  # its shards have no storages of their own
    trainer.train(resume_from_checkpoint=SETTINGS.get("resume"))
    trainer.save_model(os.path.join(SETTINGS["output_dir"], "final"))
    if trainer.accelerator.is_main_process:
        report = {"history": trainer.state.log_history, "capability": trainer.capability.state_dict()}
        report["memory"] = memory
        first = {id(p) for p in trainer.agents[0].model.parameters()}
        report["shared_parameters"] = sum(id(p) in first for p in trainer.agents[1].model.parameters())
        report["engines"] = [
            {k: v for k, v in (agent.accelerator.deepspeed_config or {}).items() if not isinstance(v, dict)}
            if hasattr(agent.accelerator, "deepspeed_config")
            else {}
            for agent in trainer.agents
        ]
        with open(os.path.join(SETTINGS["output_dir"], "report.json"), "w") as file:
            json.dump(report, file, default=str)
    return trainer


def leave():
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # now and then a thread of gloo aborts the interpreter's own way out


if __name__ == "__main__":
    main()
    leave()
