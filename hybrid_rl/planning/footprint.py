"""Bytes that a training engine and a head take on one GPU, by ZeRO stage: pure formulas, in bytes.

They restate what DeepSpeed 0.19.8 and the kernels allocate. tests/planning/test_footprint.py compares them with the
peaks of real engines on one and on two ranks.
"""

from dataclasses import dataclass

from hybrid_rl.config import Config, OptimizerConfig, UpdateConfig
from hybrid_rl.planning.shapes import ModelShape
from hybrid_rl_kernels.reference import CHUNK_ROWS

BUCKET_ELEMENTS = 50_000_000
"""Of engines/deepspeed.py, which needs DeepSpeed to be imported; a test compares the two."""
ALLREDUCE_ELEMENTS = 500_000_000
"""DeepSpeed flattens so many at once where ZeRO 0 and 1 reduce outside its buckets (buffered_allreduce_fallback)."""
LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters and of sub_group_size."""
PREFETCH_ELEMENTS = 50_000_000
"""DeepSpeed's default of stage3_prefetch_bucket_size."""
TRITON_FORWARD_BYTES, TRITON_BACKWARD_BYTES = 64 << 20, 600 << 20
"""Bounds that hybrid_rl_kernels.logprobs states and its tests hold."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one engine is trained."""

    zero_stage: int
    num_ranks: int
    dtype_bytes: int
    """Of parameters and activations: 2, or 4 in float32."""
    optimizer: OptimizerConfig

    @property
    def is_on_host(self) -> bool:
        """Whether the optimizer works on the host."""
        return self.optimizer.kind == "cpu_adam"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one training engine takes on one GPU."""

    weights: int
    """Parameters that compute, adapters included."""
    states: int
    """Float32 master weights and two moments, and the gradient buffers that DeepSpeed keeps with them."""
    moved: int
    """Part of the states that is copied when they leave the GPU and come back."""
    gradients: int
    """Kept from the first backward to the optimizer step."""
    kept: int
    """The bucket and gathered weights that ZeRO-3 does not let go of between two steps, at most; cpu_adam's passage."""
    reduction: int
    """What the reduction of gradients takes beyond that, beside the activations during backward."""
    gathered: int
    """What ZeRO-3 needs beyond that while it makes weights whole, during a forward or backward."""
    step: int
    """Temporary copies when the gradients are complete; no activation is left then."""
    host: int
    """States that live on the host for good, pinned."""


def footprint(shape: ModelShape, sharding: Sharding, *, num_trained: int) -> Footprint:
    """Return the bytes of an engine; T trained parameters, W ranks, b bytes of an element, E elements of a bucket.

        ZeRO    weights  states                     gradients   at the reduction or the step
        0       b N      8 T                        4 T         4 min(T, 5e8)
        1 bf16  b N      12 T / W + 4 T             2 T         6 min(T, 5e8)
        1 fp32  b N      12 T / W                   4 T         4 T / W
        2 bf16  b N      12 T / W                   4 T / W     -
        2 fp32  b N      12 T / W                   4 T / W     4 T / W and the bucket
        3       b N / W  12 T / W + 4 T / W         -           4 min(T / W, 1e9)

    Beside them, but for ZeRO 0 and 1 bf16, the bucket, (b + 4) E, in every backward: gradients in the dtype, and
    float32 while they are reduced; a larger tensor takes (b + 4) times its own elements. ZeRO-3 keeps it between two
    steps; on several ranks it also keeps b min(N, 1e9) of gathered weights, and takes b for each element that is on its
    way: a prefetch of 5e7, or a layer where one is larger. cpu_adam keeps 20 T / W on the host, master, moments,
    gradients twice, and up to ZeRO-2 room for the largest tensor's gradient on the GPU; there DeepSpeed also adds up
    4 T / W of gradients until the step.

    Args:
        num_trained: parameters that learn; with LoRA the adapters (and a value head), which come on top of the shape's.
    """
    stage, ranks, b = sharding.zero_stage, sharding.num_ranks, sharding.dtype_bytes
    trained, is_half = num_trained, b < 4
    total = shape.num_params + (trained if trained < shape.num_params else 0)
    share = trained // ranks
    states = {0: 8 * trained, 1: 12 * share + 4 * trained * is_half, 2: 12 * share, 3: 16 * share}[stage]
    gradients = {0: 4 * trained, 1: (2 if is_half else 4) * trained, 2: 4 * share, 3: 0}[stage]
    bucket = (b + 4) * min(BUCKET_ELEMENTS, trained)
    step = {
        0: 4 * min(trained, ALLREDUCE_ELEMENTS),
        1: 6 * min(trained, ALLREDUCE_ELEMENTS) if is_half else 4 * share,
        2: 0 if is_half else 4 * share + bucket,
        3: 4 * min(share, LIVE_ELEMENTS),
    }[stage]
    if sharding.is_on_host:
        states, gradients, step = (0, 4 * share, 0) if stage < 3 else (0, 0, b * share)
    is_gathering = stage == 3 and ranks > 1
    has_bucket = stage > 1 or (stage == 1 and not is_half)
    reduction = max(bucket, (b + 4) * min(shape.largest_tensor, trained)) * has_bucket
    kept_bucket = bucket * (stage == 3)
    passed = b * min(shape.largest_tensor, trained) * (sharding.is_on_host and stage < 3)
    return Footprint(
        weights=b * total // (ranks if stage == 3 else 1),
        states=states,
        moved=0 if sharding.is_on_host else {0: 8 * trained, 3: 16 * share}.get(stage, 12 * share),
        gradients=gradients,
        kept=kept_bucket + b * min(total, LIVE_ELEMENTS) * is_gathering + passed,
        reduction=reduction - kept_bucket,
        gathered=b * min(total, max(PREFETCH_ELEMENTS, shape.num_linear // shape.num_layers)) * is_gathering,
        step=step,
        host=20 * share if sharding.is_on_host else 0,
    )


def forward_tokens(update: UpdateConfig, *, is_free: bool) -> int:
    """Return the tokens of a pack of SCORE: four micro-batches where packing is free, see attention.uses_varlen.

    A forward without gradient keeps nothing, and kernels are launched as often for more tokens: log-probs of 1.5B
    parameters on an H200 took 88 thousand tokens a second in packs of 8192, 122 thousand in packs of 32768
    (profiling/bench_update.py). Where every pair of tokens is computed, a larger pack costs more.
    """
    return (4 if is_free else 1) * update.micro_batch_tokens


def tokens_per_rank(config: Config, *, num_sequences: int, max_tokens: int) -> tuple[int, int]:
    """Return the tokens of a full pack that one rank takes through a model, and those that its head reads.

    Of ranks that share the tokens, one may get a slice of hardly anything but responses.

    Args:
        num_sequences: of a step that the ranks have which compute a pack together.
        max_tokens: of a pack.
    """
    response = config.rollout.max_response_tokens
    length = config.prompts.max_prompt_tokens + response
    packed = min(max_tokens, num_sequences * length)
    tokens = -(-packed // config.update.sequence_parallel_size)
    return tokens, min(tokens, packed * response // length)


def head_bytes(shape: ModelShape, tokens: int, *, backend: str, backward: bool, has_entropy: bool = False) -> int:
    """Return what the log-probs of `tokens` response tokens need beyond inputs and results.

        reference, forward   2 chunks of logits, 3 when there are more chunks than one
        reference, backward  the same, 1 more for the entropy's gradient, and 8 H V: float32 gradient of the weight and
                             the product that is added to it
        triton               at most 64 and 600 MiB, and the gradient of the weight, 2 H V

    A chunk is 4 min(tokens, 1024) V bytes. A value model's head is nothing beside that.

    Args:
        backend: reference or triton, see hybrid_rl_kernels.dispatch.
    """
    if shape.vocab_size == 1:
        return 0
    weight = shape.hidden_size * shape.vocab_size
    if backend == "triton":
        return TRITON_BACKWARD_BYTES + 2 * weight if backward else TRITON_FORWARD_BYTES
    chunks = (3 if tokens > CHUNK_ROWS else 2) + (backward and has_entropy)
    return 4 * min(tokens, CHUNK_ROWS) * shape.vocab_size * chunks + (8 * weight if backward else 0)
