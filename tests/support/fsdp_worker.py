"""One rank of the FSDP runs of test_processes.py: trains as team_worker.py does, and checks what FSDP changes."""

import json
import os

import team_worker
import torch
from team_worker import SETTINGS, build, leave
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration

OUT = SETTINGS["output_dir"]


def share_held(model):
    """The share of the weights that this process holds."""
    if model is None:
        return None
    parameters = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    return sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)


@torch.no_grad()
def greedy(agent):
    """Responses of unequal length, 3 and 9 tokens: the shards of both processes are needed to the end."""
    agent.activate()
    rank = agent.accelerator.process_index
    ids = agent._tokenizer(f"{12 + rank} + 7 =", return_tensors="pt")
    model = agent.accelerator.unwrap_model(agent.model_wrapped)
    out = model.generate(**ids, do_sample=False, min_new_tokens=3 + 6 * rank, max_new_tokens=3 + 6 * rank)
    return out[0].tolist()


def synced(agent):
    """What vLLM would get, in TRL's own way of going through sharded weights."""
    agent.activate()
    agent.reshard()
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.accelerator, generation._dist = agent.model, agent.accelerator, agent._dist
    return {name: weights.clone().cpu() for name, weights in generation._iter_named_params()}


def resume_and_go_back(trainer):
    """A run that is resumed, and the best checkpoint."""
    trainer.state.best_model_checkpoint = os.path.join(OUT, "checkpoint-2")
    trainer._load_best_model()
    trainer.save_model(os.path.join(OUT, "best"))
    resumed = build(os.path.join(OUT, "resumed"))
    resumed.train(resume_from_checkpoint=os.path.join(OUT, "checkpoint-4"))
    resumed.save_model()


def bf16_from_one_process():
    """A round in bfloat16, with a learning rate of 0, of weights that the main process alone has loaded."""
    overrides = {"bpe": {"learning_rate": 0.0, "max_grad_norm": 0.0}}
    fsdp = {**SETTINGS["config"]["fsdp_config"], "cpu_ram_efficient_loading": True, "activation_checkpointing": True}
    changes = {
        "bf16": True,
        "gradient_checkpointing": False,
        "learning_rate": 0.0,
        "beta": 0.0,
        "agent_overrides": overrides,
        "fsdp_config": fsdp,
    }
    trainer = build(os.path.join(OUT, "bf16"), max_rounds=1, **changes)
    types = []
    for agent in trainer.agents:
        logps_of = agent._logps_of

        def noted(*args, logps_of=logps_of, **kwargs):
            result = logps_of(*args, **kwargs)
            types.append((result[0].dtype, torch.equal(result[0], result[0].bfloat16().float())))
            return result

        agent._logps_of = noted
    trainer.train()
    trainer.save_model()
    history = {key: value for log in trainer.state.log_history for key, value in log.items()}
    return {"types": sorted({str(each) for each in types}), "history": history}


def main():
    trainer = team_worker.main()
    rank = trainer.accelerator.process_index
    report = {
        "held": [share_held(agent.model) for agent in trainer.agents],
        "reference held": [share_held(agent.ref_model) for agent in trainer.agents],
        "plugins": len({id(agent.fsdp_plugin) for agent in trainer.agents}),
        "greedy": [greedy(agent) for agent in trainer.agents],
    }
    for agent in trainer.agents:
        torch.save(synced(agent), os.path.join(OUT, f"synced-{agent.agent_name}-{rank}.pt"))
    resume_and_go_back(trainer)
    if "fsdp_config" in SETTINGS["config"]:
        report["bf16"] = bf16_from_one_process()
    with open(os.path.join(OUT, f"fsdp-{rank}.json"), "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
    leave()
