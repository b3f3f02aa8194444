"""Time weight sync to a vLLM engine, by alias, by copy and by the methods of others; prints a table, writes a CSV.

python profiling/bench_sync.py                     # 1.5B parameters in Qwen2's shape, on a GPU, about four minutes
python profiling/bench_sync.py --device cpu --tiny  # a dry run of alias and copy

The floor is one device copy of all bytes. Without an alias, weight sync needs at least one copy out of the trainer and
one into the engine, which is twice the floor. "verified" compares eight checksums, like a run with default settings.
"""

import argparse
import os
import pickle
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_memory import milliseconds
from colocated_run import environment_line, write_csv
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_rl.config import RolloutConfig, SyncConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.monitoring.recorder import environment
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.sync import AliasSync, CopySync

HERE = Path(__file__).parent
PACKED = "vLLM's packed IPC"
SHAPE = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
SHAPE |= {"num_attention_heads": 12, "num_key_value_heads": 2}
TINY = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    way: str
    first_ms: float
    """Milliseconds of the first weight sync, which opens handles, records routes and verifies all tensors."""
    ms: float
    """Median milliseconds of the later ones."""
    floors: float
    """`ms` divided by the floor."""


@dataclass(kw_only=True)
class Trainer:
    """A model as a WeightSource."""

    model: Qwen2ForCausalLM
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = {name: p.detach() for name, p in self.model.named_parameters()}

    def named_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Return name, shape and dtype of every weight."""
        return [(name, tuple(t.shape), t.dtype) for name, t in self.weights.items()]

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the named weights."""
        yield {name: self.weights[name] for name in names}

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(t.nbytes for t in self.weights.values())


@dataclass(kw_only=True)
class Bench:
    """The rows measured so far, and the methods that failed."""

    world: World
    repeats: int
    path: Path
    """Path of the CSV file, which is written again with every row, in case the run is interrupted."""
    floor_ms: float = float("nan")
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def time(self, way: str, sync: Callable[[], object]) -> None:
        """Add a row; a method that fails is recorded and left out."""
        try:
            times = [milliseconds(sync) for _ in range(self.repeats + 1)]
        except Exception as error:
            return self.leave_out(way, error)
        median = statistics.median(times[1:])
        self.rows.append(Row(way=way, first_ms=times[0], ms=median, floors=median / self.floor_ms))
        print(f"{way}: first {times[0]:.2f} ms, then {median:.2f} ms", flush=True)
        line = environment_line(environment(self.world), f"median of {self.repeats}")
        write_csv(self.path, line, [asdict(row) for row in self.rows])
        return None

    def leave_out(self, way: str, error: Exception) -> None:
        """Record a method that fails, with its error."""
        self.missing.append(f"{way}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def start(folder: str, world: World, **extra: Any) -> VllmEngine:
    """Return an engine with the worker of this benchmark, without CUDA graphs, which weight sync does not use."""
    import vllm

    settings = RolloutConfig(kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.3, enforce_eager=True)
    original, transfer = vllm.LLM, extra.pop("transfer", {})
    vllm.LLM = lambda **kw: original(**kw | transfer | {"worker_extension_cls": "sync_worker.SyncBenchWorker"})
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    try:
        return VllmEngine(folder, settings, dtype=dtype, max_model_len=64, can_sleep=False, seed=0, **extra)
    finally:
        vllm.LLM = original


def bench_floor(bench: Bench, trainer: Trainer) -> None:
    """Time one device copy of all bytes."""
    source = torch.empty(trainer.num_bytes, dtype=torch.uint8, device=bench.world.device)
    target = torch.empty_like(source)
    bench.time("floor: one device copy", lambda: target.copy_(source))
    bench.floor_ms = bench.rows[0].ms
    bench.rows[0] = Row(**asdict(bench.rows[0]) | {"floors": 1.0})


def bench_ours(bench: Bench, trainer: Trainer, engine: VllmEngine, make: Callable[[SyncConfig], Any], way: str) -> None:
    """Time weight syncs without and with verification."""
    for num_verified, name in ((0, way), (8, f"{way}, verified")):
        engine.weights_version = 0
        bench.time(name, make(SyncConfig(num_verified=num_verified)).sync)


def bench_handles(bench: Bench, trainer: Trainer, engine: VllmEngine) -> None:
    """Time one handle per parameter: all in one message, and one message for each as in OpenRLHF.

    Each parameter has separate memory. PyTorch wraps the owner of a memory anew for every handle and frees owners
    recursively, so that thousands of handles of one buffer end in a segmentation fault.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    weights = {name: t.clone() for name, t in trainer.weights.items()}

    def send(weights: dict[str, Tensor]) -> None:
        message = pickle.dumps([(name, reduce_tensor(t)[1]) for name, t in weights.items()])
        engine.llm.collective_rpc("bench_load", args=(message,))

    bench.time("one handle per parameter, one message", lambda: send(weights))
    bench.time("one handle and one message per parameter", lambda: [send({name: t}) for name, t in weights.items()])


class Client:
    """The interface that vLLM's sender expects of an engine, through messages to SyncBenchWorker."""

    def __init__(self, engine: VllmEngine) -> None:
        self._llm = engine.llm

    def call(self, name: str, *arguments: Any) -> None:
        """Call a method of vLLM's worker."""
        self._llm.collective_rpc("bench_call", args=(pickle.dumps((name, arguments)),))

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        """Set the format."""
        self.call("init_weight_transfer_engine", info)

    def start_weight_update(self) -> None:
        """Start an update."""
        self.call("start_weight_update")

    def update_weights(self, info: Any) -> None:
        """Send a chunk."""
        self.call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish an update."""
        self.call("finish_weight_update")


def bench_packed(bench: Bench, trainer: Trainer, engine: VllmEngine) -> None:
    """Time vLLM's packed IPC transfer, through the interface that this version of vLLM has."""
    from vllm.distributed.weight_transfer import ipc_engine

    client = Client(engine)
    if hasattr(ipc_engine, "IPCTrainerWeightTransferEngine"):
        source = list(trainer.weights.items())
        sender = ipc_engine.IPCTrainerWeightTransferEngine(client=client, source=source, packed=True)
        client.init_weight_transfer_engine({"packed": True})
        bench.time(PACKED, sender.send_weights)
    else:
        client.init_weight_transfer_engine({})
        bench.time(PACKED, lambda: _send_packed(ipc_engine, client, trainer))


def _send_packed(ipc_engine: Any, client: Client, trainer: Trainer) -> None:
    """Send with the interface of vLLM up to 0.26, a static method that gets a function for sending a chunk."""
    client.start_weight_update()
    arguments = ipc_engine.IPCTrainerSendWeightsArgs(
        send_mode=lambda info: client.update_weights(info if isinstance(info, dict) else asdict(info)), packed=True
    )
    ipc_engine.IPCWeightTransferEngine.trainer_send_weights(iter(trainer.weights.items()), arguments)
    client.finish_weight_update()


def bench_others(bench: Bench, trainer: Trainer, folder: str) -> None:
    """Time the methods of others."""
    try:
        from vllm.config.weight_transfer import WeightTransferConfig

        engine = start(folder, bench.world, transfer={"weight_transfer_config": WeightTransferConfig(backend="ipc")})
    except Exception as error:
        bench.leave_out(PACKED, error)
        engine = start(folder, bench.world)
    else:
        bench_packed(bench, trainer, engine)
    bench_handles(bench, trainer, engine)
    engine.close()


def measure(bench: Bench, shape: dict[str, int]) -> None:
    """Measure alias, then copy, then on a GPU the methods of others, each with its own engine."""
    world = bench.world
    config = Qwen2Config(**shape, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0, bos_token_id=None)
    config.architectures = ["Qwen2ForCausalLM"]
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(world.device):
        model = Qwen2ForCausalLM(config).to(dtype).requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        alias_buffer = AliasBuffer(dict(model.named_parameters()), world)
        trainer = Trainer(model=model)
        bench_floor(bench, trainer)

        def alias(settings: SyncConfig) -> AliasSync:
            return AliasSync(trainer, engine, settings, world.device, Timeline(), alias_buffer=alias_buffer)

        def copy(num_bytes: int) -> Callable[[SyncConfig], CopySync]:
            def make(settings: SyncConfig) -> CopySync:
                settings = SyncConfig(num_verified=settings.num_verified, bucket_bytes=num_bytes)
                return CopySync(trainer, engine, settings, world.device, Timeline())

            return make

        engine = start(folder, world, aliased=alias_buffer.export())
        bench_ours(bench, trainer, engine, alias, "alias")
        engine.close()
        engine = start(folder, world)
        bench_ours(bench, trainer, engine, copy(1 << 30), "copy, bucket of 1 GiB")
        bench_ours(bench, trainer, engine, copy(1 << 40), "copy, bucket of the model")
        engine.close()
        if world.device.type == "cuda":
            bench_others(bench, trainer, folder)


def main() -> None:
    """Parse the command line, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="two layers")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    world = join_world()
    if world.device.type != args.device:
        parser.error(f"--device {args.device}: this machine has {world.device.type}")
    bench = Bench(world=world, repeats=args.repeats, path=args.out / "sync.csv")
    measure(bench, TINY if args.tiny else SHAPE)
    print(f"\n{'way':45} {'first ms':>10} {'ms':>10} {'floors':>8}")
    for row in bench.rows:
        print(f"{row.way:45} {row.first_ms:10.2f} {row.ms:10.3f} {row.floors:8.2f}")
    for line in bench.missing:
        print("did not run:", line)


if __name__ == "__main__":
    main()
