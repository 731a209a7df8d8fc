"""What real vLLM needs on a machine without a GPU; test code, on both sides of the connection.

vLLM syncs weights over NCCL, which needs GPUs: here they go through a file in shared memory. And its CPU backend
packs the weights of linear layers away after loading, so that new ones could not be loaded: here it leaves them be.
The servers load this module by `--worker-extension-cls cpu_vllm.FileSync`.
"""

import os
import tempfile
from pathlib import Path

import safetensors.torch
import torch
import vllm.model_executor.layers.utils as layer_utils

SHARED_MEMORY = "/dev/shm"
SERVER_ARGUMENTS = [
    *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**26)),
    *("--worker-extension-cls", "cpu_vllm.FileSync"),
]


def _plain_linear(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear


layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear


class FileSync:
    """Becomes a base class of vLLM's worker."""

    def load_from_file(self, path: str) -> int:
        weights = safetensors.torch.load_file(path)
        self.model_runner.model.load_weights(iter(weights.items()))
        return len(weights)


def sync_by_files(monkeypatch) -> None:
    """Lets TRL's client write weights into a file and tell the server to load it."""
    from requests.adapters import HTTPAdapter
    from trl.generation.vllm_client import VLLMClient

    def init_communicator(self, device=0):
        self.session.mount("http://", HTTPAdapter())  # a killed server shall not be waited for

    def update_named_params(self, metadata, named_params):
        weights = {name: tensor.detach().contiguous().clone() for name, tensor in named_params}
        assert [name for name, _, _ in metadata] == list(weights)
        handle, path = tempfile.mkstemp(suffix=".safetensors", dir=SHARED_MEMORY)
        os.close(handle)
        try:
            safetensors.torch.save_file(weights, path)
            answer = self._post(
                f"{self.base_url}/collective_rpc", json={"method": "load_from_file", "args": [path], "timeout": 60}
            )
            assert answer["results"] == [str(len(weights))] or answer["results"] == [len(weights)], answer
        finally:
            Path(path).unlink()

    monkeypatch.setattr(VLLMClient, "init_communicator", init_communicator)
    monkeypatch.setattr(VLLMClient, "update_named_params", update_named_params)
    monkeypatch.setattr(VLLMClient, "close_communicator", lambda self: None)
