"""vLLM as a rollout engine in processes of its own. Whatever depends on vLLM's version is in this folder."""

import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.vllm.arguments import engine_arguments
from hybrid_rl.engines.vllm.copies import BucketCopies
from hybrid_rl.engines.vllm.environment import engine_environment
from hybrid_rl.engines.vllm.sampling import sampling_params, to_generation
from hybrid_rl.engines.vllm.shared_memory import remove_shared_memory
from hybrid_rl.weights.bucket import AliasedWeights, Slot
from hybrid_rl.weights.protocols import TensorSlice

_TAGS = ("weights", "kv_cache")
_SHUTDOWN_TIMEOUT_S = 60.0
"""vLLM's default of 5 s is too short for an engine that ends while other processes keep the cores busy."""


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
        gpus: Sequence[str] = (),
    ) -> None:
        """Start the engine.

        Args:
            model: folder or hub name of the model's configuration, and of its tokenizer if there are stop strings.
            max_model_len: most tokens of prompt and response together.
            can_sleep: whether unmap gives memory back to the device.
            seed: of the engine's own generator.
            aliased: the trainer's weights, which the engine's parameters become views of; None for copies.
            gpus: names of the GPUs that the engine spans; none for the one GPU that this process sees.
        """
        with engine_environment(gpus):
            import vllm

            self.llm = vllm.LLM(
                **engine_arguments(
                    model,
                    config,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    can_sleep=can_sleep,
                    seed=seed,
                    aliased=aliased,
                    gpus=gpus,
                )
            )
        self.weights_version = 0
        self._copies = BucketCopies(self.llm)
        self._weights_valid = False
        self._can_sleep = can_sleep
        self._is_aliased = aliased is not None
        self._is_complete = self._is_aliased  # AliasLoader has checked it
        self._has_tokenizer = bool(config.stop_strings)
        self._mapped = set(_TAGS)

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt; see RolloutEngine.

        Raises:
            RuntimeError: the weights are not the trainer's, memory is unmapped, or stop strings were not configured.
        """
        if not self._weights_valid:
            raise RuntimeError("generate: the engine's weights were dropped or never filled; sync the trainer's first")
        if self._mapped != set(_TAGS):
            raise RuntimeError(f"generate: only {sorted(self._mapped)} of the engine is on the device")
        if not prompts:
            return []
        if sampling.stop_strings and not self._has_tokenizer:
            raise RuntimeError(
                f"generate: stop strings {list(sampling.stop_strings)}, but the engine started without a tokenizer "
                "because rollout.stop_strings was empty"
            )
        each_seed = [None] * len(prompts) if seeds is None else seeds
        parameters = [sampling_params(sampling, seed, num_requests=len(prompts)) for seed in each_seed]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        return [to_generation(output, sampling) for output in outputs]

    def seed(self, seed: int) -> None:
        """Seed the generator of every worker; see RolloutEngine."""
        self._call("hybrid_seed", seed)

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
            self._call("hybrid_check_complete")
            self._is_complete = True
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("the engine keeps its prefix cache of older weights: requests are still running")
        self._weights_valid = True
        self.weights_version += 1

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return the checksums of the named tensors, per worker; see RolloutEngine."""
        return [pickle.loads(message) for message in self._call("hybrid_checksums", pickle.dumps(list(names)))]

    def unmap(self, tag: str) -> None:
        """Give up `weights` or `kv_cache`; the memory is unmapped once both are given up, in one level-2 sleep.

        A level-2 sleep drops the weights instead of copying them to the host, because the next weight sync writes them
        anyway. Aliased weights are the trainer's memory and stay mapped; the engine sleeps without its KV cache.
        """
        if tag == "weights" and self._is_aliased:
            return
        self._mapped.discard(tag)
        if tag == "weights":
            self._weights_valid = False
        if self._can_sleep and self._mapped <= ({"weights"} if self._is_aliased else set()):
            self.llm.sleep(level=2)

    def map(self, tag: str) -> None:
        """Map the memory of `weights` or `kv_cache` again, without its contents."""
        if tag == "weights" and self._is_aliased:
            return
        if self._can_sleep:  # vLLM resumes its scheduler with the last tag; with aliases both tags come at once
            self.llm.wake_up(tags=None if self._is_aliased else [tag])
        self._mapped.add(tag)

    def close(self) -> None:
        """Unmap the trainer's bucket, end the engine's processes and remove the shared memory that they leave.

        No CUDA IPC handle may be open when the process that exported it ends.
        """
        with suppress(Exception):  # an error of a copy was raised when the weight sync finished
            self._copies.wait()
        self._copies.close()
        blocks: set[str] = set().union(*map(pickle.loads, self.llm.collective_rpc("hybrid_close_bucket")))
        self.llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
        remove_shared_memory(blocks)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # memory that the engine had open can be freed from this point on

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Return the results of a method of every worker, called when the last bucket is copied."""
        self._copies.wait()
        return self.llm.collective_rpc(method, args=arguments)
