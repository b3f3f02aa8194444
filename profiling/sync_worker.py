"""The engine's side of the methods of others that bench_sync.py measures."""

import inspect
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from hybrid_rl.engines.vllm.worker import WorkerExtension


class SyncBenchWorker(WorkerExtension):
    """Opens one handle per parameter, like OpenRLHF's worker, and calls the methods of vLLM's transfer."""

    def bench_load(self, message: bytes) -> None:
        """Open the handle of each tensor, let the model load it, and wait for the device.

        Args:
            message: pickled [(name, arguments of rebuild_cuda_tensor)].
        """
        position = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
        for name, arguments in pickle.loads(message):
            arguments = list(arguments)
            arguments[position] = self.device.index or 0
            self.model_runner.model.load_weights([(name, rebuild_cuda_tensor(*arguments))])
        torch.cuda.synchronize()

    def bench_call(self, message: bytes) -> Any:
        """Call a method of vLLM's worker and wait for the device; message is a pickled (name, arguments)."""
        name, arguments = pickle.loads(message)
        getattr(self, name)(*arguments)
        torch.cuda.synchronize()
