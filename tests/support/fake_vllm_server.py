"""A stand-in for vLLM in tests that run without it: TRL's own code runs, only its client talks to no server.

Every address stands for a server with a model of its own, loaded from the agent's folder. It samples with
transformers, and learns new weights from the client only, as a real one would.
"""

import threading

import torch
from transformers import AutoModelForCausalLM


class FakeServer:
    """What stands behind an address.

    Attributes:
        before: is called with every request, before it is answered.
        logprobs: changes the reported log-probabilities of a response: list -> list.
        requests, syncs: how many there were.
        instance: another one stands for a server that was restarted.
    """

    def __init__(self, folder, before=lambda: None, logprobs=lambda values: values, mode="processed_logprobs"):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.before, self.logprobs, self.mode = before, logprobs, mode
        self.requests = self.syncs = 0
        self.folder = str(folder)
        self.seed(0)
        self.group_port = None
        self.instance = "first"

    def seed(self, number):
        """What `vllm serve --seed` does."""
        self.number = number
        self.generator = torch.Generator().manual_seed(number)

    @torch.no_grad()
    def sample(self, prompt, count, max_tokens, temperature):
        ids = torch.tensor([prompt] * count)
        logps = []
        for _ in range(max_tokens):
            scores = torch.log_softmax(self.model(ids).logits[:, -1] / temperature, -1)
            tokens = torch.multinomial(scores.exp(), 1, generator=self.generator)
            logps.append(scores.gather(1, tokens))
            ids = torch.cat([ids, tokens], 1)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        result = []
        for row, values in zip(ids[:, len(prompt) :].tolist(), torch.cat(logps, 1).tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            result.append((row[:length], self.logprobs(values[:length])))
        return result


class FakeClient:
    """Has the methods of `VLLMClient` that TRL calls."""

    servers: dict[str, FakeServer] = {}
    syncing = threading.Lock()

    def __init__(self, base_url, group_port, connection_timeout):
        if base_url not in self.servers:
            raise ConnectionError(
                f"The vLLM server can't be reached at {base_url} after {connection_timeout} seconds."
            )
        self.base_url = base_url
        self.server = self.servers[base_url]
        self.server.group_port = group_port

    def init_communicator(self, device):
        pass

    def get_server_info(self):
        server = self.server
        model = {"logprobs_mode": server.mode, "model": server.folder, "seed": server.number}
        return {"instance_id": server.instance, "model_config": model}

    def generate(self, prompts, features=None, *, n, max_tokens, temperature, **kwargs):
        self.server.requests += 1
        self.server.before()
        choices = [choice for prompt in prompts for choice in self.server.sample(prompt, n, max_tokens, temperature)]
        return {
            "prompt_ids": prompts,
            "completion_ids": [ids for ids, _ in choices],
            "logprobs": [[[value] for value in values] for _, values in choices],
            "logprob_token_ids": [[[token] for token in ids] for ids, _ in choices],
        }

    def update_named_params(self, metadata, named_params):
        assert self.syncing.acquire(blocking=False), "two agents sync their weights at once"
        try:
            state = {name: weights.clone() for name, weights in named_params}
        finally:
            self.syncing.release()
        assert [name for name, _, _ in metadata] == list(state)
        missing = set(self.server.model.state_dict()) - set(state)
        assert missing <= {"lm_head.weight"}, f"the server did not get {missing}"
        self.server.model.load_state_dict(state, strict=False)
        self.server.syncs += 1

    def reset_prefix_cache(self):
        pass


def use_fake_servers(monkeypatch, folders, **settings):
    """Puts one stand-in behind every address http://<name>:8000 of the folders.

    Returns:
        The servers by name.
    """
    servers = {name: FakeServer(folder, **settings) for name, folder in folders.items()}
    monkeypatch.setattr(FakeClient, "servers", {f"http://{name}:8000": s for name, s in servers.items()})
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMClient", FakeClient)
    monkeypatch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda *args, **kwargs: True)
    return servers
