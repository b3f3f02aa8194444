"""vLLM as a rollout engine in processes of its own. Whatever depends on vLLM's version is in this folder."""

import atexit
import functools
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hybrid_rl.batch import ConversationStart, Rollout
from hybrid_rl.config import LoraConfig, RolloutConfig
from hybrid_rl.engines import Generation, ReportStage, RunConversations, Sampling
from hybrid_rl.engines.vllm.adapters import adapter_request
from hybrid_rl.engines.vllm.arguments import engine_arguments
from hybrid_rl.engines.vllm.copies import BucketCopies
from hybrid_rl.engines.vllm.environment import engine_environment
from hybrid_rl.engines.vllm.folder import EngineFolder
from hybrid_rl.engines.vllm.processes import EngineProcesses
from hybrid_rl.engines.vllm.sampling import sampling_params, to_generation
from hybrid_rl.engines.vllm.stages import StartStages
from hybrid_rl.engines.vllm.stream import open_stream
from hybrid_rl.engines.vllm.watch import Call, EngineWatch
from hybrid_rl.weights.bucket import AliasedWeights, Slot
from hybrid_rl.weights.protocols import TensorSlice

_TAGS = ("weights", "kv_cache")
_END_LIMIT_S = 60.0
"""Time in which an engine ends that is asked to, also while other processes keep the cores busy."""
_BROKEN_END_LIMIT_S = 5.0
"""Time in which an engine ends that is in the middle of a call."""
_CALL_LIMIT_S = 10.0
"""Time in which an idle engine gives the trainer's bucket back before it ends."""
_START_POLL_S = 0.5
_POLLING_SHARE = 0.01
"""Share of a core that the processes of an engine use which does nothing but poll."""

logger = logging.getLogger(__name__)


class VllmEngine:
    """One vLLM engine; see RolloutEngine for the methods.

    It starts with dummy weights, which the first weight sync fills, or with aliases of the trainer's weights. In both
    modes generate is refused until the first weight sync is finished. `llm` is the vllm.LLM, for benchmarks and tests.
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
        adapters: LoraConfig | None = None,
        gpus: Sequence[str] = (),
        is_restart: bool = False,
        stall_timeout_s: float = 300.0,
        trust_remote_code: bool = False,
        report: ReportStage = lambda *_: None,
    ) -> None:
        """Start the engine.

        Args:
            model: folder or hub name of the model's configuration, and of its tokenizer if there are stop strings.
            max_model_len: most tokens of prompt and response together.
            can_sleep: whether unmap gives memory back to the device.
            seed: of the engine's own generator.
            aliased: the trainer's weights, which the engine's parameters become views of; None for copies.
            adapters: settings, with target_modules, of adapters that the engine gets beside the weights; None for none.
            gpus: names of the GPUs that the engine spans; none for the one GPU that this process sees.
            is_restart: whether the trainer's models are loaded, so that less memory is free than at the first start.
            stall_timeout_s: see RunConfig.
            trust_remote_code: see ModelsConfig.
            report: receives the stages of the start.

        Raises:
            EngineLostError: a process of the engine ends or makes no progress; by this and by every other method.
        """
        self._folder, self._processes = EngineFolder(), EngineProcesses()
        self._watch = EngineWatch(self._processes, stall_timeout_s=stall_timeout_s)
        self._copies = BucketCopies(
            self._call_workers, self._watch, num_workers=max(1, len(gpus)), folder=self._folder.path
        )
        self._starting: Call[Any] | None = None
        self._stages = StartStages(self._folder.path, report)
        self._is_closed = False
        self.weights_version, self._weights_valid = 0, False
        self._can_sleep, self._has_adapters = can_sleep, adapters is not None
        self._is_complete = aliased is not None  # AliasLoader has checked it
        self._owns_weights = aliased is None or self._has_adapters
        self._has_tokenizer, self._mapped = bool(config.stop_strings), set(_TAGS)
        atexit.register(self.close)  # of a run that ends while it is built
        sizes: dict[str, Any] = {"dtype": dtype, "max_model_len": max_model_len, "seed": seed, "gpus": gpus}
        weights: dict[str, Any] = {"aliased": aliased, "adapters": adapters, "trust_remote_code": trust_remote_code}
        make_arguments = partial(
            engine_arguments, model, config, can_sleep=can_sleep, is_restart=is_restart, **sizes, **weights
        )
        self._start_or_close(gpus, make_arguments)

    def _start_or_close(self, gpus: Sequence[str], make_arguments: Callable[[], dict[str, Any]]) -> None:
        """Start vLLM with arguments that are made in the environment of its processes."""
        try:
            with engine_environment(gpus, folder=self._folder.path, report=self._processes.report_path):
                self._start(make_arguments())
        except BaseException:
            self.close()
            raise

    def _start(self, arguments: dict[str, Any]) -> None:
        """Start vLLM; the CPU time of its processes is the progress of the start."""
        import vllm

        self._stages.launch()
        self._starting = Call(lambda: vllm.LLM(**arguments))
        self._watch.wait(self._starting.has_ended, "start", progress=self._start_progress, poll_s=_START_POLL_S)
        self._stages.end()
        self.llm = self._watch.result(self._starting, "start")
        core = self.llm.llm_engine.engine_core
        receive = core.get_output

        def get_output() -> Any:
            outputs = receive()
            self._watch.sign_of_progress()
            return outputs

        core.get_output = get_output
        self._processes.watch_workers(self._rpc("hybrid_pid", doing="name its processes"))
        self._folder.record(self._processes.shared_memory())

    def _start_progress(self) -> int | None:
        """Return a number that grows with the CPU time of all processes; None while one is stopped."""
        self._folder.record(self._processes.shared_memory())
        self._stages.look()
        running = self._processes.running()
        step_s = _POLLING_SHARE * self._watch.stall_timeout_s
        if not running:  # this process imports vLLM, and makes the settings of the core process
            return int(time.process_time() / step_s)
        return (
            None if any(state.is_stopped for state in running) else int(sum(state.cpu_s for state in running) / step_s)
        )

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt; see RolloutEngine.

        Raises:
            RuntimeError: the weights are not the trainer's, memory is unmapped, or stop strings were not configured.
        """
        self._raise_unless_ready(sampling)
        if not prompts:
            return []
        each_seed = [None] * len(prompts) if seeds is None else seeds
        parameters = [sampling_params(sampling, seed, num_requests=len(prompts)) for seed in each_seed]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._watch.call(
            lambda: self.llm.generate(requests, parameters, use_tqdm=False, lora_request=self._adapter),
            f"generate {len(prompts)} responses",
        )
        return [to_generation(output, sampling) for output in outputs]

    def converse(self, starts: Sequence[ConversationStart], sampling: Sampling, run: RunConversations) -> list[Rollout]:
        """Return one conversation per start, in order; see RolloutEngine.

        Raises:
            RuntimeError: see generate.
        """
        self._raise_unless_ready(sampling)
        doing = f"generate {len(starts)} conversations"
        with open_stream(self.llm.llm_engine, self._watch, sampling, doing, adapter=self._adapter) as stream:
            return run(stream, starts)

    @functools.cached_property
    def _adapter(self) -> Any:
        """vLLM's LoRARequest of every request; None without adapters."""
        return adapter_request() if self._has_adapters else None

    def _raise_unless_ready(self, sampling: Sampling) -> None:
        if not self._weights_valid:
            raise RuntimeError("generate: the engine's weights were dropped or never filled; sync the trainer's first")
        if self._mapped != set(_TAGS):
            raise RuntimeError(f"generate: only {sorted(self._mapped)} of the engine is on the device")
        if sampling.stop_strings and not self._has_tokenizer:
            raise RuntimeError(
                f"generate: stop strings {list(sampling.stop_strings)}, but the engine started without a tokenizer "
                "because rollout.stop_strings was empty"
            )

    def seed(self, seed: int) -> None:
        """Seed the generator of every worker; see RolloutEngine."""
        self._rpc("hybrid_seed", seed, doing="take a seed")

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Map the trainer's bucket in every worker; see RolloutEngine."""
        self._copies.open(handle, plan)
        self._is_complete = False

    def load_bucket(self, index: int) -> None:
        """Start to copy bucket `index` of the plan; see RolloutEngine.

        Raises:
            RuntimeError: the weights are unmapped.
        """
        if "weights" not in self._mapped:
            raise RuntimeError("load_bucket: the engine's weights are not on the device")
        self._weights_valid = False
        self._copies.start(index)

    def finish_sync(self) -> None:
        """Wait for the last copy, drop the prefix cache and increment weights_version; see RolloutEngine.

        Raises:
            RuntimeError: a parameter is not filled, by name; or the prefix cache is not dropped.
        """
        self._copies.wait()
        if not self._is_complete:  # checked once, because every weight sync fills the same elements
            self._rpc("hybrid_check_complete", doing="check its weights")
            self._is_complete = True
        if self._watch.call(self.llm.reset_prefix_cache, "drop its prefix cache") is False:
            raise RuntimeError("the engine keeps its prefix cache of older weights: requests are still running")
        self._weights_valid = True
        self.weights_version += 1

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return the checksums of the named tensors, per worker; see RolloutEngine."""
        messages = self._rpc("hybrid_checksums", pickle.dumps(list(names)), doing="compute checksums of its weights")
        return [pickle.loads(message) for message in messages]

    def unmap(self, tag: str) -> None:
        """Give up `weights` or `kv_cache`; the memory is unmapped once both are given up, in one level-2 sleep.

        A level-2 sleep drops the weights instead of copying them to the host, because the next weight sync writes them
        anyway. Aliased weights are the trainer's memory and stay mapped; beside them `weights` are the adapters, and
        without adapters the engine sleeps without its KV cache.
        """
        if tag == "weights" and not self._owns_weights:
            return
        self._mapped.discard(tag)
        if tag == "weights":
            self._weights_valid = False
        if self._can_sleep and self._mapped <= (set() if self._owns_weights else {"weights"}):
            self._watch.call(lambda: self.llm.sleep(level=2), "give up its memory")

    def map(self, tag: str) -> None:
        """Map the memory of `weights` or `kv_cache` again, without its contents."""
        if tag == "weights" and not self._owns_weights:
            return
        if self._can_sleep:  # vLLM resumes its scheduler with the last tag; with aliases alone both tags come at once
            tags = [tag] if self._owns_weights else None
            self._watch.call(lambda: self.llm.wake_up(tags=tags), "map its memory")
        self._mapped.add(tag)

    def close(self) -> None:
        """End the engine's processes, whatever state they are in, and remove what they leave; raise nothing.

        An engine that is in the middle of a call, or does not answer, is killed. A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._give_bucket_back()
        self._copies.close()
        self._folder.request_end()
        limit_s = _BROKEN_END_LIMIT_S if self._watch.is_broken else _END_LIMIT_S
        if self._processes.end(limit_s) and not self._watch.is_broken:
            logger.warning("the rollout engine did not end when it was asked to, and was killed")
        self._end_client()
        self._processes.close()
        self._folder.remove()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # memory that the engine had open can be freed from this point on

    def _give_bucket_back(self) -> None:
        """Let an idle engine unmap the bucket: no CUDA IPC handle may be open when its exporter ends."""
        self._watch.stall_timeout_s = min(self._watch.stall_timeout_s, _CALL_LIMIT_S)
        if self._watch.is_broken or any(state.is_stopped for state in self._processes.running()):
            return
        with suppress(Exception):  # an error of a copy was raised when the weight sync finished
            self._copies.wait()
        if self._watch.is_broken:
            return
        try:
            self._watch.call(lambda: self._call_workers("hybrid_close_bucket"), "unmap the bucket")
        except Exception as error:
            logger.warning("the rollout engine is ended without its consent: %s", error)

    def _end_client(self) -> None:
        """End vLLM's side in this process, of a start in progress too."""
        deadline = time.monotonic() + _CALL_LIMIT_S
        while self._starting and not self._starting.has_ended(_START_POLL_S) and time.monotonic() < deadline:
            self._processes.end(0.0)  # a core process that the start has just launched
        if hasattr(self, "llm"):
            Call(lambda: self.llm.llm_engine.engine_core.shutdown(timeout=0.0)).has_ended(_CALL_LIMIT_S)

    def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Return the results of a method of every worker."""
        return self.llm.collective_rpc(method, args=arguments)

    def _rpc(self, method: str, *arguments: Any, doing: str) -> list[Any]:
        """Return the results of a method of every worker, called when the last bucket is copied."""
        self._copies.wait()
        return self._watch.call(lambda: self._call_workers(method, *arguments), doing)
