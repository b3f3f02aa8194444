"""The engine's side of weight sync, inside a vLLM worker: it copies from the trainer's bucket, or aliases it."""

import base64
import gc
import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from hybrid_rl.engines.vllm.adapters import AdapterSlot, plain_layers
from hybrid_rl.engines.vllm.arguments import LOAD_FORMAT
from hybrid_rl.engines.vllm.cpu_layers import keep_cpu_weights_plain, rotate_heads_in_pytorch
from hybrid_rl.engines.vllm.lifetime import end_with_trainer, ignore_signals_in_worker
from hybrid_rl.engines.vllm.rotary import move_buffers
from hybrid_rl.engines.vllm.stages import record_stages
from hybrid_rl.weights.bucket import AliasedWeights, Slot, copy_tensors, open_ipc_bucket
from hybrid_rl.weights.choice import is_adapter
from hybrid_rl.weights.routes import Routes


class AliasLoader(BaseModelLoader):
    """Model loader that makes the parameters views of the trainer's buffer, before vLLM captures or compiles them."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the weights are in memory."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Build the model on the host, where memory that is never written takes no space, and alias the weights."""
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self.load_config.device = "cpu"
        return super().load_model(*args, **kwargs)

    @torch.no_grad()
    def load_weights(self, model: Any, model_config: Any) -> None:
        """Alias all parameters, and move the model's buffers to the device.

        Raises:
            RuntimeError: a tensor of the trainer has no place in the model, or a parameter differs in layout; by name.
        """
        aliased: AliasedWeights = pickle.loads(base64.b64decode(self.load_config.model_loader_extra_config["aliased"]))
        device = self._device or torch.device("cpu")
        model.hybrid_routes = Routes(model, open_ipc_bucket(aliased.handle, device))
        for slot in aliased.slots:
            model.hybrid_routes.record(slot, copies=False)
        model.hybrid_routes.alias()
        move_buffers(model, device)


class WorkerExtension:
    """Methods that vLLM adds to its worker (`worker_extension_cls`); the trainer calls them through collective_rpc.

    Arguments and results are pickled here, so that vLLM's insecure serialization can stay off.
    """

    model_runner: Any
    device: torch.device
    rank: int
    _pipe: Connection
    _bucket: Tensor
    _plan: list[list[Slot]]
    _adapters: AdapterSlot | None
    _copies: dict[int, tuple[list[Tensor], list[Tensor]]]

    @property
    def _routes(self) -> Routes:
        """Where the trainer's tensors are in this worker's model; stored in the model, which loader and worker have."""
        return self.model_runner.model.hybrid_routes

    def hybrid_open_bucket(self, message: bytes) -> None:
        """Map the trainer's bucket on this worker's device, and open a pipe to the trainer.

        Args:
            message: pickled (handle, plan, address of the pipe).
        """
        handle, plan, address = pickle.loads(message)
        self._plan, self._copies, self._adapters = plan, {}, None
        self._pipe = Client(address)
        self._bucket = open_ipc_bucket(handle, self.device, worker=self.rank)
        if any(not is_adapter(slot.name) for bucket in plan for slot in bucket):  # otherwise the model has aliases
            self.model_runner.model.hybrid_routes = Routes(self.model_runner.model, self._bucket)

    def hybrid_load_buckets(self) -> None:
        """Copy each bucket whose number arrives in the pipe, and answer when it is copied; end at an empty message.

        A trainer that closes the pipe has given up the weight sync; the worker then ends it without an error.

        Raises:
            Exception: the first error of a copy; no bucket is copied after it.
        """
        error: Exception | None = None
        with suppress(EOFError, ConnectionError):
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
        """Copy bucket `index` of the plan into the weights and wait until the copy is done."""
        if is_adapter(self._plan[index][0].name):
            self._load_adapters(self._plan[index])
        elif index in self._copies:
            copy_tensors(*self._copies[index])
        else:
            with plain_layers(self.model_runner):
                for slot in self._plan[index]:
                    self._routes.record(slot, copies=True)
            pairs = [pair for slot in self._plan[index] for pair in self._routes.pairs(slot.name)]
            self._copies[index] = [target for target, _ in pairs], [source for _, source in pairs]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _load_adapters(self, slots: Sequence[Slot]) -> None:
        """Copy the adapters; the first time vLLM registers them, because their memory may be unmapped before."""
        if self._adapters is None:
            self._adapters = AdapterSlot(self.model_runner, self._bucket, slots)
        else:
            self._adapters.load()

    def hybrid_check_complete(self) -> None:
        """Check that the plan has filled every parameter of the engine; see Routes.check_complete."""
        self._routes.check_complete()

    @torch.no_grad()
    def hybrid_checksums(self, message: bytes) -> bytes:
        """Return the pickled {name: [(slice, checksum)]} of the parts that this worker holds of the named tensors."""
        names: Sequence[str] = pickle.loads(message)
        weights = [name for name in names if not is_adapter(name)]
        adapters = [name for name in names if is_adapter(name)]
        held = self._routes.checksums(weights) if weights else {}
        if adapters:
            assert self._adapters
            held |= self._adapters.checksums(adapters)
        return pickle.dumps(held)

    def hybrid_close_bucket(self) -> None:
        """Unmap the trainer's bucket."""
        if hasattr(self.model_runner.model, "hybrid_routes"):
            self._routes.close()
        self._plan, self._copies, self._adapters = [], {}, None
        self._bucket = torch.empty(0, dtype=torch.uint8)
        gc.collect()

    def hybrid_pid(self) -> int:
        """Return the id of this worker's process."""
        return os.getpid()

    def hybrid_seed(self, seed: int) -> None:
        """Seed this worker's generator."""
        torch.manual_seed(seed)


register_model_loader(LOAD_FORMAT)(AliasLoader)
record_stages()
end_with_trainer()
ignore_signals_in_worker()
if not torch.cuda.is_available():
    keep_cpu_weights_plain()
    rotate_heads_in_pytorch()
