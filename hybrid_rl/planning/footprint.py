"""Bytes that a training engine and a log-prob head take on one GPU, by ZeRO stage, as formulas.

The formulas describe the allocations of DeepSpeed 0.19.8 and of the kernels. tests/planning/test_footprint.py compares
them with the peaks of real engines on one and on two ranks.
"""

from dataclasses import dataclass

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.planning.model_shape import PREFETCH_ELEMENTS, ModelShape
from hybrid_rl_kernels.reference import CHUNK_ROWS

BUCKET_ELEMENTS = 50_000_000
"""Bucket size of engines/deepspeed/settings.py, restated because planning imports no engine; a test compares them."""
ALLREDUCE_ELEMENTS = 500_000_000
"""Elements that ZeRO 0 and 1 flatten for one all-reduce: default of DeepSpeed's buffered_allreduce_fallback."""
LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters and sub_group_size."""
GATHERED_BYTES = 1 << 30
"""Bytes of weights that an export, a moving average or a moving reference gathers at a time with ZeRO-3."""
TRITON_FORWARD_BYTES, TRITON_BACKWARD_BYTES = 64 << 20, 600 << 20
"""Upper bounds stated by hybrid_rl_kernels.logprobs."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the states of one training engine are divided among ranks."""

    zero_stage: int
    num_ranks: int
    dtype_bytes: int
    """Bytes of an element of parameters and activations: 2, or 4 in float32."""
    optimizer: OptimizerConfig

    @property
    def is_on_host(self) -> bool:
        """Whether the optimizer and its states are on the host."""
        return self.optimizer.kind == "cpu_adam"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one training engine on one GPU."""

    parameter_bytes: int
    """Parameters that forward and backward use, adapters included."""
    optimizer_bytes: int
    """Float32 master weights, two moments, and the gradient buffers that DeepSpeed keeps with them."""
    moved_bytes: int
    """Part of optimizer_bytes that is copied to the host at a release and back at a restore."""
    gradient_bytes: int
    """Gradients, from the first backward to the optimizer step."""
    buffer_bytes: int
    """Upper bound of communication buffers that stay allocated between two steps."""
    reduction_bytes: int
    """Additional buffers of the gradient reduction during backward."""
    gathered_bytes: int
    """Additional gathered weights of ZeRO-3 during a forward or backward."""
    step_bytes: int
    """Temporary copies of the optimizer step, when no activations are left."""
    host_bytes: int
    """Pinned host memory of an optimizer on the host."""
    initial_gradient_bytes: int
    """Float32 gradients with which DeepSpeed creates the optimizer's states, before the first step; freed again."""


def engine_footprint(shape: ModelShape, sharding: Sharding, *, num_trained: int) -> Footprint:
    """Return the bytes of a training engine: N parameters, T of them trained, W ranks, b bytes of an element.

        ZeRO    parameters  optimizer              gradients   at the reduction or the step
        0       b N         8 T                    4 T         4 min(T, 5e8)
        1 bf16  b N         12 T / W + 4 T         2 T         6 min(T, 5e8)
        1 fp32  b N         12 T / W               4 T         4 T / W
        2 bf16  b N         12 T / W               4 T / W     -
        2 fp32  b N         12 T / W               4 T / W     4 T / W and the bucket
        3       b N / W     12 T / W + 4 T / W     -           4 min(T / W, 1e9)

    Every backward except with ZeRO 0 and 1 bf16 also needs the bucket, (b + 4) E for E elements: gradients in the
    dtype, and in float32 during their reduction. A tensor larger than the bucket takes (b + 4) times its own elements.

    ZeRO-3 keeps the bucket between two steps. On several ranks it also keeps b min(N, 1e9) of gathered weights, and
    takes b for each element in transit: a prefetch of 5e7, a layer if that is larger, or what a tensor has above 1e9.

    cpu_adam keeps 20 T / W on the host: master weights, moments, and gradients twice. Up to ZeRO-2 it keeps room for
    the largest tensor's gradient on the GPU, and DeepSpeed accumulates 4 T / W of gradients until the step.

    Args:
        shape: sizes of the model; with tensor parallelism, of one rank's shard.
        sharding: how the ranks divide it.
        num_trained: number of trained parameters; with LoRA, the parameters of the adapters and of a value head, which
            come on top of the shape's.
    """
    stage, b, trained = sharding.zero_stage, sharding.dtype_bytes, num_trained
    is_half, is_on_host = b < 4, sharding.is_on_host
    total = shape.num_params + (trained if trained < shape.num_params else 0)
    shard = trained // sharding.num_ranks
    optimizer = {0: 8 * trained, 1: 12 * shard + 4 * trained * is_half, 2: 12 * shard, 3: 16 * shard}[stage]
    gradients = {0: 4 * trained, 1: (2 if is_half else 4) * trained, 2: 4 * shard, 3: 0}[stage]
    bucket = (b + 4) * min(BUCKET_ELEMENTS, trained)
    step = {
        0: 4 * min(trained, ALLREDUCE_ELEMENTS),
        1: 6 * min(trained, ALLREDUCE_ELEMENTS) if is_half else 4 * shard,
        2: 0 if is_half else 4 * shard + bucket,
        3: 4 * min(shard, LIVE_ELEMENTS),
    }[stage]
    if is_on_host:
        optimizer, gradients, step = (0, 4 * shard, 0) if stage < 3 else (0, 0, b * shard)
    is_gathering = stage == 3 and sharding.num_ranks > 1
    has_bucket = stage > 1 or (stage == 1 and not is_half)
    largest = min(shape.largest_tensor, trained)
    reduction = max(bucket, (b + 4) * largest) * has_bucket
    kept_bucket = bucket * (stage == 3)
    in_transit = max(shape.largest_layer, shape.largest_tensor - LIVE_ELEMENTS)
    kept_gradient = b * largest * (is_on_host and stage < 3)
    return Footprint(
        parameter_bytes=b * total // (sharding.num_ranks if stage == 3 else 1),
        optimizer_bytes=optimizer,
        moved_bytes=0 if is_on_host else {0: 8 * trained, 3: 16 * shard}.get(stage, 12 * shard),
        gradient_bytes=gradients,
        buffer_bytes=kept_bucket + b * min(total, LIVE_ELEMENTS) * is_gathering + kept_gradient,
        reduction_bytes=reduction - kept_bucket,
        gathered_bytes=b * min(total, max(PREFETCH_ELEMENTS, in_transit)) * is_gathering,
        step_bytes=step,
        host_bytes=20 * shard if is_on_host else 0,
        initial_gradient_bytes=0 if is_on_host else 4 * (min(shard, LIVE_ELEMENTS) if stage == 3 else shard),
    )


def head_bytes(
    shape: ModelShape, tokens: int, *, backend: str, backward: bool, has_entropy: bool = False, is_frozen: bool = False
) -> int:
    """Return the bytes that the log-probs of `tokens` response tokens need beyond inputs and results.

        reference, forward   2 chunks of logits, 3 if there is more than one chunk
        reference, backward  as forward, 1 more for the entropy's gradient, and 8 H V: the float32 gradient of the
                             weight and the product that is added to it
        triton               at most 64 (forward) or 600 MiB (backward), and 2 H V for the gradient of the weight

    H is the hidden size, V the vocabulary; a chunk is 4 min(tokens, 1024) V bytes. The head of a value model is
    negligible and counts 0.

    Args:
        shape: sizes of the model.
        tokens: response tokens of a pack.
        backend: reference or triton, see hybrid_rl_kernels.dispatch.
        backward: whether gradients are computed.
        has_entropy: whether the loss has an entropy term.
        is_frozen: whether the weight has no gradient, as with adapters.
    """
    if shape.vocab_size == 1:
        return 0
    weight = 0 if is_frozen else shape.hidden_size * shape.vocab_size
    if backend == "triton":
        return TRITON_BACKWARD_BYTES + 2 * weight if backward else TRITON_FORWARD_BYTES
    chunks = (3 if tokens > CHUNK_ROWS else 2) + (backward and has_entropy)
    return 4 * min(tokens, CHUNK_ROWS) * shape.vocab_size * chunks + (8 * weight if backward else 0)
