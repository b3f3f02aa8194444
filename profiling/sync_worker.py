"""The engine's side of the ways that bench_sync.py compares with ours."""

import inspect
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from hybrid_rl.engines.vllm.worker import WorkerExtension


class BenchReceiver(WorkerExtension):
    """Opens a handle for each parameter, as OpenRLHF's worker does, and calls what vLLM's own transfer needs."""

    def bench_load(self, message: bytes) -> None:
        """Open each tensor's handle, let the model load it, and wait; message is [(name, arguments of the handle)]."""
        place = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
        for name, arguments in pickle.loads(message):
            arguments = list(arguments)
            arguments[place] = self.device.index or 0
            self.model_runner.model.load_weights([(name, rebuild_cuda_tensor(*arguments))])
        torch.cuda.synchronize()

    def bench_call(self, message: bytes) -> Any:
        """Call a method of vLLM's worker; message is (name, arguments)."""
        name, arguments = pickle.loads(message)
        getattr(self, name)(*arguments)
        torch.cuda.synchronize()
