"""What runs inside the vLLM worker process: it maps the trainer's bucket and copies from it into the live weights."""

import gc
import logging
import os
import pickle
import re
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rl.bucket import Slot, checksum, open_shared
from hybrid_rl.engines import Region

logger = logging.getLogger(__name__)


class CopyRecorder(TorchDispatchMode):
    """Notes every copy_ that reads from one storage, as (destination view, region of the source slot).

    A vLLM model knows where a checkpoint tensor belongs (which rows of a fused projection, which shard) only as code in
    its load_weights. Watching that code once gives the destinations as plain views; later hand-overs need no vLLM code.
    """

    def __init__(self, bucket: Tensor, slot: Slot) -> None:
        super().__init__()
        self._bucket_address = bucket.untyped_storage().data_ptr()
        self._first_element = slot.offset // slot.dtype.itemsize
        self.copies: list[tuple[Tensor, Region]] = []
        self.num_foreign = 0
        """Copies whose source was computed from the slot, not read from it: these cannot be replayed."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            destination, source = args[0], args[1]
            if source.untyped_storage().data_ptr() == self._bucket_address and source.dtype == destination.dtype:
                offset = source.storage_offset() - self._first_element
                self.copies.append((destination, (tuple(source.shape), tuple(source.stride()), offset)))
            else:
                self.num_foreign += 1
        return result


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


class WeightReceiver:
    """Mixed into the vLLM worker through `worker_extension_cls`; its methods are called with collective_rpc.

    Arguments and results are pickled here, so that no insecure serialization has to be switched on in vLLM.
    """

    model_runner: Any
    device: torch.device

    def hybrid_open_bucket(self, message: bytes) -> None:
        """Map the trainer's bucket; message is (handle, plan)."""
        handle, plan = pickle.loads(message)
        self._plan: list[list[Slot]] = plan
        self._bucket: Tensor | None = open_shared(handle, self.device)
        self._routes: dict[str, list[tuple[Tensor, Region]]] = {}

    @torch.no_grad()
    def hybrid_receive(self, index: int) -> None:
        """Copy bucket `index` of the plan into the weights and wait until that is done."""
        assert self._bucket is not None
        for slot in self._plan[index]:
            source = slot.view(self._bucket)
            if slot.name not in self._routes:
                self._record(slot, source)
                continue
            flat = source.flatten()
            for destination, region in self._routes[slot.name]:
                destination.copy_(flat.as_strided(*region[:2], flat.storage_offset() + region[2]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _record(self, slot: Slot, source: Tensor) -> None:
        """Let the model load one tensor and keep the copies that it made."""
        assert self._bucket is not None
        with CopyRecorder(self._bucket, slot) as recorder:
            self.model_runner.model.load_weights([(slot.name, source)])
        if recorder.num_foreign:
            raise RuntimeError(
                f"{slot.name}: this vLLM model transforms it while loading ({recorder.num_foreign} computed copies), "
                "so it cannot be handed over in place; use rollout.engine = hf for this architecture"
            )
        self._routes[slot.name] = recorder.copies

    def hybrid_finish_push(self) -> None:
        """Check that every parameter of the engine has been filled from the plan."""
        nowhere = [name for name, copies in self._routes.items() if not copies]
        if nowhere:
            raise RuntimeError(f"no engine parameter takes these trainer tensors: {', '.join(nowhere)}")
        written: dict[int, int] = {}
        for copies in self._routes.values():
            for destination, _ in copies:
                address = destination.untyped_storage().data_ptr()
                written[address] = written.get(address, 0) + destination.numel()
        model = self.model_runner.model
        padded = {id(m.weight) for m in model.modules() if hasattr(m, "num_embeddings_padded") and hasattr(m, "weight")}
        for name, parameter in model.named_parameters():
            count = written.get(parameter.untyped_storage().data_ptr(), 0)
            if count == 0 or (count < parameter.numel() and id(parameter) not in padded):
                raise RuntimeError(
                    f"engine parameter {name}: {count} of {parameter.numel()} elements come from the trainer"
                )

    @torch.no_grad()
    def hybrid_checksums(self, message: bytes) -> bytes:
        """Return a pickled {name: [(region, checksum)]} of what this worker holds of the named tensors."""
        names: Sequence[str] = pickle.loads(message)
        held = {name: [(region, checksum(view)) for view, region in self._routes[name]] for name in names}
        return pickle.dumps(held)

    def hybrid_close_bucket(self) -> bytes:
        """Unmap the trainer's bucket, after which nothing can be received; return the queues' shared memory, pickled.

        A queue is removed by its owner's finalizer, which a process that was killed, or cut short on busy cores, never
        runs. Both ends of every queue are mapped here, so the trainer learns the names from this process.
        """
        self._plan, self._bucket, self._routes = [], None, {}
        gc.collect()
        return pickle.dumps(mapped_shared_memory())

    def hybrid_seed(self, seed: int) -> None:
        """Seed this worker's own generator."""
        torch.manual_seed(seed)


end_with_trainer()
if not torch.cuda.is_available():
    keep_cpu_weights_plain()
