"""What runs inside the vLLM worker process: it maps the trainer's bucket and copies out of it, or computes in it."""

import base64
import gc
import logging
import os
import pickle
import re
import select
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from hybrid_rl.engines.vllm.engine import LOAD_FORMAT
from hybrid_rl.weights.bucket import AliasedWeights, Slot, copy_tensors, open_ipc_bucket
from hybrid_rl.weights.routes import Routes

logger = logging.getLogger(__name__)


def keep_cpu_weights_plain() -> None:
    """Make vLLM on a CPU multiply with the parameters themselves.

    It would pack linear weights into oneDNN's layout after loading and drop the originals, which a hand-over then could
    not reach: the engine would go on with the old weights.
    """
    import vllm.model_executor.layers.utils as layer_utils

    def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    layer_utils.dispatch_cpu_unquantized_gemm = plain_linear


def end_with_trainer() -> None:
    """End this process, and with it the engine, when the trainer ends, even by SIGKILL.

    vLLM would wait for requests for ever and keep the device's memory.
    """
    trainer = int(os.environ.get("HYBRID_RL_TRAINER_PID", os.getpid()))
    if trainer == os.getpid():
        return
    try:
        descriptor = os.pidfd_open(trainer)
    except OSError as error:  # a sandbox may forbid it; only a killed trainer would leave its engine then
        logger.warning("cannot watch the trainer process %d: %s", trainer, error)
        return

    def watch() -> None:
        select.select([descriptor], [], [])  # readable once it has ended
        os._exit(1)

    threading.Thread(target=watch, name="end_with_trainer", daemon=True).start()


def mapped_shared_memory() -> set[str]:
    """Return the names of the multiprocessing.shared_memory blocks that this process maps."""
    with open("/proc/self/maps") as maps:
        return set(re.findall(r"/dev/shm/(psm_\w+)$", maps.read(), re.MULTILINE))


class AliasLoader(BaseModelLoader):
    """Loads nothing: binds a model's parameters to the trainer's buffer, before anything is captured or compiled."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to fetch."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Build the model on the host, where memory that nobody touches costs nothing, and bind it."""
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.load_config.device = "cpu"
        return super().load_model(*args, **kwargs)

    @torch.no_grad()
    def load_weights(self, model: Any, model_config: Any) -> None:
        """Bind all parameters, and bring to the device what the model keeps beside them.

        Raises:
            RuntimeError: a tensor has no place, or one that the trainer's layout does not give it; by name.
        """
        aliased: AliasedWeights = pickle.loads(base64.b64decode(self.load_config.model_loader_extra_config["aliased"]))
        device = self._device or torch.device("cpu")
        model.hybrid_routes = Routes(model, open_ipc_bucket(aliased.handle, device))
        for slot in aliased.slots:
            model.hybrid_routes.record(slot, copies=False)
        model.hybrid_routes.bind()
        for module in model.modules():
            for name, tensor in module.named_buffers(recurse=False):
                module._buffers[name] = tensor.to(device)
            if hasattr(module, "_compute_cos_sin_cache"):  # the host's cosines differ from the GPU's in their last bits
                with device:
                    module.cos_sin_cache.copy_(module._compute_cos_sin_cache())


class WorkerExtension:
    """Mixed into the vLLM worker through `worker_extension_cls`; its methods are called with collective_rpc.

    Arguments and results are pickled here, so that no insecure serialization has to be switched on in vLLM.
    """

    model_runner: Any
    device: torch.device
    rank: int
    _pipe: Connection
    _plan: list[list[Slot]]
    _copies: dict[int, tuple[list[Tensor], list[Tensor]]]

    @property
    def _routes(self) -> Routes:
        """Where the trainer's tensors lie in this worker's model; the model keeps it, for a loader knows no worker."""
        return self.model_runner.model.hybrid_routes

    def hybrid_open_bucket(self, message: bytes) -> None:
        """Map the trainer's bucket, of several that on this worker's device, and open a pipe to the trainer.

        Args:
            message: (handle, plan, address of the pipe).
        """
        handle, plan, address = pickle.loads(message)
        self._plan, self._copies = plan, {}
        self._pipe = Client(address)
        bucket = open_ipc_bucket(handle, self.device, worker=self.rank)
        self.model_runner.model.hybrid_routes = Routes(self.model_runner.model, bucket)

    def hybrid_load_buckets(self) -> None:
        """Copy the buckets that the pipe names into the weights until it names none, and answer when each is done.

        Raises:
            Exception: the first that a copy raised; no bucket is copied after it.
        """
        error: Exception | None = None
        while message := self._pipe.recv_bytes():
            try:
                if not error:
                    self._copy(int.from_bytes(message, "little"))
            except Exception as caught:
                error = caught
            self._pipe.send_bytes(message)
        if error:
            raise error

    @torch.no_grad()
    def _copy(self, index: int) -> None:
        """Copy bucket `index` of the plan into the weights and wait until that is done."""
        if index in self._copies:
            copy_tensors(*self._copies[index])
        else:
            for slot in self._plan[index]:
                self._routes.record(slot, copies=True)
            pairs = [pair for slot in self._plan[index] for pair in self._routes.pairs(slot.name)]
            self._copies[index] = [to for to, _ in pairs], [source for _, source in pairs]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def hybrid_check_complete(self) -> None:
        """Check that every parameter of the engine has been filled from the plan."""
        self._routes.check_complete()

    @torch.no_grad()
    def hybrid_checksums(self, message: bytes) -> bytes:
        """Return a pickled {name: [(region, checksum)]} of what this worker holds of the named tensors."""
        names: Sequence[str] = pickle.loads(message)
        return pickle.dumps(self._routes.checksums(names))

    def hybrid_close_bucket(self) -> bytes:
        """Unmap the trainer's bucket, after which nothing can be received; return the queues' shared memory, pickled.

        A queue is removed by its owner's finalizer, which a process that was killed, or cut short on busy cores, never
        runs. Both ends of every queue are mapped here, so the trainer learns the names from this process.
        """
        if hasattr(self.model_runner.model, "hybrid_routes"):
            self._routes.unbind()
        self._plan, self._copies = [], {}
        gc.collect()
        return pickle.dumps(mapped_shared_memory())

    def hybrid_seed(self, seed: int) -> None:
        """Seed this worker's own generator."""
        torch.manual_seed(seed)


register_model_loader(LOAD_FORMAT)(AliasLoader)
end_with_trainer()
if not torch.cuda.is_available():
    keep_cpu_weights_plain()
