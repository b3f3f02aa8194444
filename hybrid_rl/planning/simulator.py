"""Predicts how long the phases of a step take, from a handful of rates: a prediction, to be held against measurements.

Work is counted (tokens, operations, bytes) with every response at full length; all that is uncertain is in `Rates`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_rl.config import Config
from hybrid_rl.planning.plan import Machine, Plan, Shapes

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one H100 SXM and its links do.

    "Measured" is on one H100 80GB with torch 2.11, vLLM 0.26 and DeepSpeed 0.19; other numbers name their source.
    """

    matmul_flops: float = 790e12
    """Dense bf16, per second; what cuBLAS reaches at best; measured at [8192, 4096] x [4096, 128256]: 683e12."""
    forward_efficiency: float = 0.65
    """Of that rate in a forward; measured in SCORE of a 1.5B GRPO run on an H200, in packs of 98304 tokens.

    This and the two after it are with Liger's kernels and launches that wait for nothing; 0.45 and 0.65 before them.
    """
    update_efficiency: float = 0.87
    """The same in forward and backward, beside `launch_s`."""
    launch_s: float = 1.6e-3
    """What a micro-batch takes per layer beside its products, once forward and twice backward, much of it on the host.

    This and update_efficiency are of actors of 1.5B on an H200: 7.4 s in 16 micro-batches of 24576 tokens; a quarter of
    the batch 2.0 s in 4 of them, 2.8 in 13 of 8192, 5.4 in 26 of 4096.
    """
    memory_bytes_per_s: float = 3.01e12
    """Device memory, read and written; measured."""
    decode_efficiency: float = 0.4
    """Of that in a decode step: an assumption."""
    host_s_per_step: float = 2.4e-3
    """What a decode step takes on the engine's core, of an H200's host, for however few sequences."""
    host_s_per_sequence: float = 13.2e-6
    """What each sequence adds to it; both measured at 128 and 512 sequences of 1.5B, responses sent whole."""
    bus_out_bytes_per_s: float = 55.1 * GB
    """Pinned, to the host; measured."""
    bus_in_bytes_per_s: float = 55.1 * GB
    """Pinned, to the device; measured."""
    deepspeed_out_bytes_per_s: float = 13 * GB
    """DeepSpeed's offload_states, ZeRO-2, steady; measured."""
    deepspeed_in_bytes_per_s: float = 43 * GB
    """Its reload_states; measured."""
    node_bytes_per_s: float = 260 * GB
    """Per GPU and direction within a node: all-reduces of 200 MB between two H200 over NVLink, 337 GB/s for 3 GB."""
    network_bytes_per_s: float = 40 * GB
    """Per GPU between nodes: 80 % of one 400 Gbit/s port per GPU; not measured here."""
    sync_s: float = 0.037
    """Host time of a hand-over through one buffer, 1.5B; measured."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, and what came of them."""

    phases: dict[str, float]
    """Seconds by what is done."""
    num_tokens: int
    """Prompt and response tokens of the step, all ranks."""
    num_ranks: int
    decode_bound: str
    """What limits a decode step: host or bandwidth."""

    @property
    def total_s(self) -> float:
        """Seconds of the step; nothing overlaps."""
        return sum(self.phases.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens of the step, per second and GPU."""
        return self.num_tokens / self.total_s / self.num_ranks


def bus_seconds(plan: Plan, swap: str, rates: Rates) -> float:
    """Return the seconds that a GPU's link to the host is busy in a step, one direction after the other.

    Frozen models come back at the bus's speed in every mode; DeepSpeed moves the states of those that learn.
    """
    if swap == "off":
        return 0.0
    seconds = 0.0
    for row in plan.allocations:
        by_deepspeed = swap == "deepspeed" and row.name.endswith("_optimizer")
        out = rates.deepspeed_out_bytes_per_s if by_deepspeed else rates.bus_out_bytes_per_s
        back = rates.deepspeed_in_bytes_per_s if by_deepspeed else rates.bus_in_bytes_per_s
        seconds += row.out_bytes / out + row.in_bytes / back
    return seconds


def simulate(config: Config, machine: Machine, shapes: Shapes, plan: Plan, rates: Rates) -> StepTime:
    """Return the predicted time of a step of the loop, its batch spread evenly over all ranks."""
    work = _Work(config, machine, shapes, rates)
    decode, bound = work.decode(plan)
    phases = {
        "rollout: prefill": work.prefill(),
        "rollout: decode": decode,
        "score": work.score(),
        "update critic": work.update("critic"),
        "update actor": work.update("actor"),
        "sync": rates.sync_s + work.gathering(1, "actor"),
        "collectives": work.collectives(),
        "exchanges": work.exchanges(),
        "bus": bus_seconds(plan, config.memory.swap, rates),
    }
    length = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    return StepTime(
        phases=phases,
        num_tokens=config.responses_per_step * length,
        num_ranks=machine.num_ranks,
        decode_bound=bound,
    )


class _Work:
    """What one rank does in a step, in seconds."""

    def __init__(self, config: Config, machine: Machine, shapes: Shapes, rates: Rates) -> None:
        self._config = config
        self._machine = machine
        self._shapes = shapes
        self._rates = rates
        self._prompt, self._response = config.prompts.max_prompt_tokens, config.rollout.max_response_tokens
        self._sequences = -(-config.responses_per_step // machine.num_ranks)  # a rank with one more holds up the others
        self._tokens = self._sequences * (self._prompt + self._response)
        self._dtype_bytes = 4 if config.models.dtype == "float32" else 2

    def _forward(self, tokens: int, length: int, *, head_tokens: int, name: str = "actor") -> float:
        """Return the operations of a forward of one of the models."""
        shape = getattr(self._shapes, name)
        return shape.forward_flops(tokens, length) + shape.head_flops(head_tokens)

    def prefill(self) -> float:
        """Return the seconds in which the prompts are read, shared ones once."""
        shares = self._config.rollout.group_size if self._config.rollout.prefix_caching else 1
        tokens = -(-self._sequences // shares) * self._prompt
        flops = self._forward(tokens, self._prompt, head_tokens=self._sequences)
        return flops / (self._rates.matmul_flops * self._rates.forward_efficiency)

    def decode(self, plan: Plan) -> tuple[float, str]:
        """Return the seconds of all decode steps and what bounds them.

        A step takes the longer of the host's time for it and for its sequences, and of reading every weight once per
        engine and the keys and values of what each sequence has so far, half its response on average. An engine over
        several GPUs has the sequences of all of them, and reads a part on each; what they tell each other is left out.
        """
        rates, engines = self._rates, self._machine.engines_per_gpu
        size = self._config.rollout.tensor_parallel_size
        sequences = size * self._sequences
        at_once = max(engines, min(sequences, plan.wave, plan.max_sequences))
        waves = -(-sequences // at_once)
        shape = self._shapes.actor
        token_bytes = shape.kv_bytes_per_token(self._dtype_bytes, num_gpus=size)
        cache = at_once * (self._prompt + self._response / 2) * token_bytes
        read = engines * shape.num_params * self._dtype_bytes / size + cache
        by_memory = read / (rates.memory_bytes_per_s * rates.decode_efficiency)
        by_host = rates.host_s_per_step + at_once / engines * rates.host_s_per_sequence
        seconds = waves * self._response * max(by_memory, by_host)
        return seconds, "host" if by_host > by_memory else "bandwidth"

    def score(self) -> float:
        """Return the seconds of all forwards without gradient: old and reference log-probs, values, reward model."""
        size, flops = self._config.update.tensor_parallel_size, 0.0
        length, responses = self._prompt + self._response, size * self._sequences * self._response
        for name, is_cut in self._scored():
            head_tokens = 0 if name in ("critic", "reward") else responses
            tokens = self._tokens if is_cut else size * self._tokens
            flops += self._forward(tokens, length, head_tokens=head_tokens, name=name)
        return flops / (self._rates.matmul_flops * self._rates.forward_efficiency)

    def _scored(self) -> Iterator[tuple[str, bool]]:
        """Yield the shape of each forward of SCORE, and whether tensor parallel ranks hold the model between them."""
        config, shapes = self._config, self._shapes
        if config.update.old_logprobs == "trainer":
            yield "actor", True
        if config.has_reference:
            yield "actor", False
        if shapes.critic:
            yield "critic", True
        if shapes.reward:
            yield "reward", False

    def update(self, name: str) -> float:
        """Return the seconds of all epochs: 3 forwards' worth of operations, a 4th for what is computed again.

        With adapters the weights have no gradient of their own, which leaves 2; the head's logits are always computed
        again in its backward, by every rank of a tensor parallel group for all its tokens.
        """
        if getattr(self._shapes, name) is None:
            return 0.0
        models, epochs = self._config.models, self._config.update.num_epochs
        body = self._forward(self._tokens, self._prompt + self._response, head_tokens=0, name=name)
        sharers = self._config.update.tensor_parallel_size
        head = getattr(self._shapes, name).head_flops(sharers * self._sequences * self._response)
        factor = (2 if models.lora.rank else 3) + models.gradient_checkpointing
        launching = factor * getattr(self._shapes, name).num_layers * self._num_micro_batches * self._rates.launch_s
        return launching + epochs * (factor * body + 4 * head) / (
            self._rates.matmul_flops * self._rates.update_efficiency
        )

    @property
    def _num_micro_batches(self) -> int:
        """Micro-batches of all epochs; ranks that share tokens compute those of all of them."""
        update = self._config.update
        tokens = update.num_epochs * update.sequence_parallel_size * self._tokens
        return max(self._num_steps, -(-tokens // update.micro_batch_tokens))

    @property
    def _num_steps(self) -> int:
        """Optimizer steps of all epochs."""
        update = self._config.update
        return update.num_epochs * (self._config.responses_per_step // update.mini_batch_size)

    @property
    def _link(self) -> float:
        """Bytes per second and GPU of a ring over all ranks: its slowest link decides."""
        return self._rates.node_bytes_per_s if self._machine.num_nodes == 1 else self._rates.network_bytes_per_s

    def gathering(self, times: int, name: str) -> float:
        """Return the seconds to make a ZeRO-3 model whole on every rank; a ring moves (W - 1) / W of it."""
        ranks, shape = self._machine.num_ranks, getattr(self._shapes, name)
        if self._config.update.zero_stage < 3 or shape is None:
            return 0.0
        return times * self._dtype_bytes * shape.num_params * (ranks - 1) / ranks / self._link

    def exchanges(self) -> float:
        """Return the seconds in which ranks of a node exchange what a layer needs of theirs.

        Ranks that share tokens exchange queries, keys, values and what attention makes of them, as much backward, keys
        repeated where there are fewer heads than ranks. Ranks that share matrices have all tokens of the group and sum
        hidden states over a ring, twice per layer forward and five times backward.
        """
        update, again = self._config.update, self._config.models.gradient_checkpointing
        tokens, matrices = update.sequence_parallel_size, update.tensor_parallel_size
        scored = list(self._scored())
        elements = 0.0
        for name in ("actor", "critic", "reward"):
            shape = getattr(self._shapes, name)
            if shape is None:
                continue
            epochs = 0 if name == "reward" else update.num_epochs
            forwards, cut = scored.count((name, True)) + scored.count((name, False)), scored.count((name, True))
            key_size = max(shape.key_size, tokens * shape.head_size)
            passes = forwards + (2 + again) * epochs
            elements += passes * shape.num_layers * 2 * (shape.query_size + key_size) * (tokens - 1) / tokens
            sums = 2 * cut + (7 + 2 * again) * epochs
            elements += sums * shape.num_layers * 2 * shape.hidden_size * (matrices - 1)
        return elements * self._tokens * self._dtype_bytes / self._rates.node_bytes_per_s

    def collectives(self) -> float:
        """Return the seconds of the collectives of both updates and of SCORE, none of which overlaps with computing.

        DeepSpeed sums gradients in the weights' dtype: once per optimizer step with ZeRO 0 and 1, once per micro-batch
        with 2 and 3; up to 2 by an all-reduce, which moves twice what a reduce-scatter does. ZeRO-1 and 2 gather
        weights once per optimizer step, ZeRO-3 in every forward and backward.
        """
        config, update, ranks = self._config, self._config.update, self._machine.num_ranks
        share = (ranks - 1) / ranks
        steps, micros = self._num_steps, self._num_micro_batches
        reductions = {0: 2 * steps, 1: 2 * steps, 2: 2 * micros, 3: micros}[update.zero_stage]
        seconds = 0.0
        for name in ("actor", "critic"):
            shape = getattr(self._shapes, name)
            if shape is None:
                continue
            lora = config.models.lora
            trained = shape.num_adapted(lora) if lora.rank else shape.num_params
            seconds += reductions * self._dtype_bytes * trained * share / self._link
            if update.zero_stage in (1, 2):
                seconds += steps * self._dtype_bytes * trained * share / self._link
            seconds += self.gathering(2 * micros + micros // max(1, update.num_epochs), name)
        return seconds
