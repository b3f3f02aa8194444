"""Who will be on a GPU in which phase, in bytes, before anything loads; whether it fits, and what would make it fit.

The same plan sizes the run: KV cache, tenants that stay because there is room, and the error that refuses to start.
Numbers without a formula are measurements and name their place; estimates say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hybrid_rl.config import Config
from hybrid_rl.memory.phases import Phase
from hybrid_rl.models.attention import packs_freely, repeats_keys
from hybrid_rl.models.fused_layers import uses_liger
from hybrid_rl.planning.footprint import Footprint, Sharding, footprint, forward_tokens, head_bytes, micro_batch_shares
from hybrid_rl.planning.shapes import ModelShape, read_shape
from hybrid_rl.weights.bucket import bucket_bytes, plan_halves
from hybrid_rl.weights.layout import why_copy
from hybrid_rl_kernels import dispatch

GIB = 1 << 30
MARGIN = 0.05
"""Share of the card that a plan leaves free: the error that issue 4 aims at, and the allocator's rounding."""
TRAINER_CONTEXT_BYTES, CONNECTION_BYTES = int(1.3 * GIB), int(0.9 * GIB)
"""CUDA context and libraries on an H200: 1.21 GiB beyond what PyTorch had reserved, 0.1 that no process owned; where
two share tokens, or an engine: beside the trainer's memory 6.56 GiB, else 5.65; 3.21, planned 2.2. By guess NCCL's."""
ENGINE_CONTEXT_BYTES, GRAPHS_LAYER_BYTES = int(0.9 * GIB), int(0.8 * GIB) // 28
"""What vLLM 0.26 kept asleep on an H200, weights shared: 0.87 GiB eager, 1.67 with 102 CUDA graphs of 28 layers."""
ENGINE_BATCH_TOKENS = 8192
"""vLLM's max_num_batched_tokens for an LLM on an 80 GB card; its prefill computes so many at once."""
KV_BLOCK_TOKENS = 16
"""vLLM's default block size on a GPU."""
CHECKSUM_BYTES = 72 << 20
"""bucket.checksums: products of 8 rows of 2^20 int64, and a row of factors that stays; counted in its source."""

SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase
ALWAYS = frozenset(Phase)
ENGINE_ROWS = frozenset({"engine_weights", "engine_kv_cache"})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run gets."""

    gpu_memory_bytes: int
    num_gpus: int = 1
    """Of a node."""
    num_nodes: int = 1
    backend: Literal["reference", "triton"] = dispatch.SETTING  # type: ignore[assignment]
    """Which log-prob kernels compute."""
    engines_per_gpu: int = 1
    """Engine processes that share the sequences of a GPU."""

    @property
    def num_ranks(self) -> int:
        """GPUs of all nodes."""
        return self.num_gpus * self.num_nodes

    @property
    def budget_bytes(self) -> int:
        """What a plan may use of a GPU."""
        return int(self.gpu_memory_bytes * (1 - MARGIN))


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of the models of a run; None where it has none."""

    actor: ModelShape
    critic: ModelShape | None
    reference: ModelShape | None
    reward: ModelShape | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """Something that takes memory of every GPU in some phases."""

    name: str
    num_bytes: int
    phases: frozenset[Phase] = ALWAYS
    host_bytes: int = 0
    """Pinned memory of its copy on the host."""
    out_bytes: int = 0
    """Copied to the host in a step."""
    in_bytes: int = 0
    """Copied back in a step."""

    def kept(self) -> "Row":
        """Return the row of the same tenant when it stays in every phase."""
        return Row(name=self.name, num_bytes=self.num_bytes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be where."""

    rows: tuple[Row, ...]
    machine: Machine
    residency: dict[str, frozenset[Phase]]
    """The trainer's table, in which what has room in every phase is in every phase."""
    kv_bytes: int
    """KV cache of all engines of a GPU."""
    kv_tokens: int
    """Tokens that fit in it."""
    max_sequences: int
    """Sequences of full length that fit in it."""
    wave: int
    """Sequences that would be decoded at once if the KV cache had room."""

    def peak(self, phase: Phase) -> int:
        """Return the bytes of a GPU in use at the worst moment of a phase."""
        return sum(row.num_bytes for row in self.rows if phase in row.phases)

    @property
    def stays(self) -> frozenset[str]:
        """Rows of the residency table that never move."""
        return frozenset(name for name, phases in self.residency.items() if phases == ALWAYS)

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Name of a phase -> name of a row -> its bytes at the phase's worst moment."""
        return {p.value: {row.name: row.num_bytes for row in self.rows if p in row.phases} for p in Phase}

    def sized(self, config: Config) -> Config:
        """Return the config with the exact size of the KV cache, per engine."""
        if config.rollout.kv_cache_memory_bytes is not None:
            return config
        kv_bytes = self.kv_bytes // self.machine.engines_per_gpu
        return replace(config, rollout=replace(config.rollout, kv_cache_memory_bytes=kv_bytes))

    @property
    def has_room_for_cache(self) -> bool:
        """Whether nothing moves, and what the engine takes while it generates has room beside the trainer's peak."""
        moving = [row for row in self.rows if row.name in self.residency and row.phases != ALWAYS]
        generating = sum(row.num_bytes for row in self.rows if row.phases == {ROLLOUT})
        return not moving and self.peak(self.worst) + generating <= self.machine.budget_bytes

    @property
    def worst(self) -> Phase:
        """The phase with the highest peak."""
        return max(Phase, key=self.peak)

    @property
    def missing_bytes(self) -> int:
        """What the worst phase needs beyond the budget; 0 when all fits and one sequence has a KV cache."""
        return max(0, self.peak(self.worst) - self.machine.budget_bytes)

    @property
    def host_bytes(self) -> int:
        """Pinned memory of a node, all its GPUs together."""
        return self.machine.num_gpus * sum(row.host_bytes for row in self.rows)

    @property
    def bus_bytes(self) -> tuple[int, int]:
        """Bytes copied out to the host and back in a step, per GPU."""
        return sum(row.out_bytes for row in self.rows), sum(row.in_bytes for row in self.rows)

    def refusal(self) -> str:
        """Return what is missing, where, in words."""
        phase, machine = self.worst, self.machine
        return (
            f"phase {phase.value} needs {self.peak(phase):,} bytes ({self.peak(phase) / GIB:.1f} GiB) of each GPU, but "
            f"{machine.budget_bytes:,} ({machine.budget_bytes / GIB:.1f} GiB) are available, {MARGIN:.0%} of the card "
            "left free"
        )


def read_shapes(config: Config) -> Shapes:
    """Read the sizes of all models of a run from their folders.

    Raises:
        ConfigError: a folder holds no model.
    """
    paths = config.models
    critic, reference = paths.critic or paths.reward or paths.actor, paths.reference or paths.actor
    needs_reference = config.has_reference and not config.shares_reference
    return Shapes(
        actor=read_shape(paths.actor, field="models.actor", is_policy=True),
        reward=read_shape(paths.reward, field="models.reward", is_policy=False) if paths.reward else None,
        critic=read_shape(critic, field="models.critic", is_policy=False) if config.has_critic else None,
        reference=read_shape(reference, field="models.reference", is_policy=True) if needs_reference else None,
    )


def make_plan(config: Config, machine: Machine, shapes: Shapes, residency: Mapping[str, frozenset[Phase]]) -> Plan:
    """Return the plan of a run.

    memory.swap says what moves: off nothing, deepspeed and vmm all that the residency table sends away, auto only what
    would not fit. What costs most time on the bus stays first, and the engine's two rows stay or go together.
    """
    planner = _Planner(config, machine, shapes, residency)
    tenants = planner.tenants()
    others = [*planner.contexts(), *planner.score(), *planner.update("actor"), *planner.update("critic")]
    stays = frozenset[str]()
    tenants["engine_kv_cache"] = kv = planner.kv_row([*_settle(tenants, stays), *others])
    if config.memory.swap == "auto":
        for group in planner.by_cost(tenants):
            more = stays | group
            rows = [*_settle(tenants, more), *others]
            if all(sum(row.num_bytes for row in rows if p in row.phases) <= machine.budget_bytes for p in Phase):
                stays = more
    rows = _settle(tenants, stays)
    tokens = kv.num_bytes // planner.kv_token_bytes
    return Plan(
        rows=tuple(row for row in [*rows, *others] if row.num_bytes or row.host_bytes),
        machine=machine,
        residency=dict(residency) | dict.fromkeys(stays & residency.keys(), ALWAYS),
        kv_bytes=kv.num_bytes,
        kv_tokens=tokens,
        max_sequences=tokens // planner.full_length,
        wave=planner.wave,
    )


def _settle(tenants: Mapping[str, Row], stays: frozenset[str]) -> list[Row]:
    """Return the rows when some of them stay."""
    return [row.kept() if name in stays else row for name, row in tenants.items()]


def num_entries(phases: frozenset[Phase]) -> int:
    """Return how often a step enters a set of phases from outside, in the order of the loop."""
    order = list(Phase)
    return sum(phase in phases and order[place - 1] not in phases for place, phase in enumerate(order))


class _Planner:
    """The rows of a plan, one method for each kind."""

    def __init__(
        self, config: Config, machine: Machine, shapes: Shapes, residency: Mapping[str, frozenset[Phase]]
    ) -> None:
        self._config, update = config, config.update
        self._machine, self._shapes, self._residency = machine, shapes, residency
        self._dtype_bytes = 4 if config.models.dtype == "float32" else 2
        length = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
        self.full_length = -(-length // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
        sequences, size = -(-config.responses_per_step // machine.num_ranks), config.rollout.tensor_parallel_size
        self.wave = min(size * sequences, config.rollout.max_num_seqs * machine.engines_per_gpu)
        held = sequences * update.sequence_parallel_size * update.tensor_parallel_size
        is_gpu = machine.backend == "triton"
        self._is_half_on_gpu = is_gpu and self._dtype_bytes == 2
        is_free = packs_freely(config.models.attention, is_gpu=is_gpu)
        forward = forward_tokens(update, is_free=is_free)
        self._forward_shares = micro_batch_shares(config, num_sequences=held, max_tokens=forward)
        held = min(held, update.mini_batch_size)  # on one rank just as many, on several never more
        self._update_shares = micro_batch_shares(config, num_sequences=held, max_tokens=update.micro_batch_tokens)
        dtype = torch.float32 if self._dtype_bytes == 4 else torch.bfloat16
        self._actor_tensors = [(name, shape, dtype) for name, shape in shapes.actor.tensors]
        self._shares_weights = (
            config.sync.mode != "copy"
            and config.rollout.engine == "vllm"
            and why_copy(config, architecture=shapes.actor.architecture, tensors=self._actor_tensors) is None
        )
        """Whether the engine computes with the trainer's weights where they lie, so that they exist once."""
        self.kv_token_bytes = shapes.actor.kv_bytes_per_token(self._dtype_bytes, num_gpus=size)

    def tenants(self) -> dict[str, Row]:
        """Return the rows that the residency table may move, and the parameters, as if all of them did."""
        b, shapes = self._dtype_bytes, self._shapes
        rows: dict[str, Row] = {}
        engine_weights = b * shapes.actor.num_params // self._config.rollout.tensor_parallel_size
        rows["engine_weights"] = self._tenant("engine_weights", 0 if self._shares_weights else engine_weights)
        for name, shape in {"reference": shapes.reference, "reward_model": shapes.reward}.items():
            if shape:
                rows[name] = self._tenant(name, b * shape.num_params, back=b * shape.num_params)
        for name in ("actor", "critic"):
            if part := self.engine(name):
                parts = [
                    self._tenant(f"{name}_states", part.states, out=part.moved, back=part.moved),
                    Row(name=f"{name} optimizer on the host", num_bytes=0, host_bytes=part.host),
                    Row(name=f"{name} buckets", num_bytes=part.kept),
                    self._tenant(f"{name}_parameters", part.weights, out=part.weights, back=part.weights),
                ]
                rows |= {row.name: row for row in parts}
        return rows

    def _tenant(self, name: str, num_bytes: int, *, out: int = 0, back: int = 0) -> Row:
        phases = ALWAYS if self._is_fixed(name) else self._residency.get(name, ALWAYS)
        trips = num_entries(phases)
        return Row(
            name=name,
            num_bytes=num_bytes,
            phases=phases,
            host_bytes=max(out, back) if trips else 0,
            out_bytes=trips * out,
            in_bytes=trips * back,
        )

    def _is_fixed(self, name: str) -> bool:
        """Return whether nothing can move a tenant."""
        swap = self._config.memory.swap
        return swap == "off" or (
            (swap == "deepspeed" and name.endswith("_parameters"))  # its offload parts them from their masters
            or (name in ENGINE_ROWS and self._config.rollout.engine == "hf")  # which has no sleep
            or (name == "actor_parameters" and self._shares_weights)  # the engine has them open
        )

    def engine(self, name: str) -> Footprint | None:
        """Return the footprint of `actor` or `critic`; None without a critic."""
        shape: ModelShape | None = getattr(self._shapes, name)
        if shape is None:
            return None
        update, lora = self._config.update, self._config.models.lora
        shape = shape.of_rank(update.tensor_parallel_size)
        sharding = Sharding(
            zero_stage=update.zero_stage,
            num_ranks=self._machine.num_ranks // update.tensor_parallel_size,
            dtype_bytes=self._dtype_bytes,
            optimizer=getattr(update, name),
        )
        return footprint(shape, sharding, num_trained=shape.num_adapted(lora) if lora.rank else shape.num_params)

    def by_cost(self, tenants: Mapping[str, Row]) -> list[frozenset[str]]:
        """Return the rows that move, those that copy most first and the engine, which copies nothing, last."""
        moving = [n for n, row in tenants.items() if row.phases != ALWAYS and n not in ENGINE_ROWS]
        moving.sort(key=lambda n: -(tenants[n].out_bytes + tenants[n].in_bytes))
        return [*(frozenset({name}) for name in moving), ENGINE_ROWS]

    def kv_row(self, rows: list[Row]) -> Row:
        """Return the KV cache: as set, else what one wave needs, at most what the ROLLOUT phase leaves."""
        row = self._tenant("engine_kv_cache", 0)
        if (wanted := self._config.rollout.kv_cache_memory_bytes) is not None:
            return replace(row, num_bytes=wanted * self._machine.engines_per_gpu)
        tokens = self.wave * self.full_length + KV_BLOCK_TOKENS * self._machine.engines_per_gpu  # vLLM's null block
        used = max(sum(r.num_bytes for r in rows if p in r.phases) for p in row.phases)
        free = (self._machine.budget_bytes - used) // self.kv_token_bytes
        least = (self.full_length + KV_BLOCK_TOKENS) * self._machine.engines_per_gpu
        tokens = max(least, min(tokens, free)) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        return replace(row, num_bytes=tokens * self.kv_token_bytes)

    def contexts(self) -> list[Row]:
        """Return what is there in every phase, and what the engine computes with."""
        config, plan = self._config, plan_halves(self._actor_tensors, self._config.sync.bucket_bytes)
        num_connections = (config.update.sequence_parallel_size > 1) + (config.rollout.tensor_parallel_size > 1)
        rows = [
            Row(name="trainer context", num_bytes=TRAINER_CONTEXT_BYTES),
            Row(name="connections", num_bytes=CONNECTION_BYTES * num_connections),
            Row(name="staging bucket", num_bytes=0 if self._shares_weights else bucket_bytes(plan)),
            Row(name="checksums", num_bytes=2 * CHECKSUM_BYTES, phases=frozenset({SYNC})),
        ]
        if config.update.tensor_parallel_size > 1 or (config.update.zero_stage == 3 and self._machine.num_ranks > 1):
            largest = max(sum(slot.nbytes for slot in bucket) for bucket in plan)
            rows.append(Row(name="gathered weights", num_bytes=largest, phases=frozenset({SYNC})))
        if config.rollout.engine == "vllm":
            engines, graphs = self._machine.engines_per_gpu, 0 if config.rollout.enforce_eager else GRAPHS_LAYER_BYTES
            context = ENGINE_CONTEXT_BYTES + graphs * self._shapes.actor.num_layers
            size = engines * self._engine_activations()
            rows.append(Row(name="engine context", num_bytes=engines * context))
            rows.append(Row(name="engine activations", num_bytes=size, phases=frozenset({ROLLOUT})))
        return rows

    def _engine_activations(self) -> int:
        """Return an estimate: the widest point of a layer over a prefill batch, and three float32 logits of a batch."""
        shape, rollout = self._shapes.actor, self._config.rollout
        layer = shape.transient_bytes(ENGINE_BATCH_TOKENS, self._dtype_bytes)
        return layer + 3 * 4 * min(self.wave, rollout.max_num_seqs) * shape.vocab_size

    def score(self) -> list[Row]:
        """Return what the forwards of SCORE hold at most."""
        shapes, (tokens, responses), b = self._shapes, self._forward_shares, self._dtype_bytes
        models = [s for s in (shapes.actor, shapes.critic, shapes.reference, shapes.reward) if s]
        head = head_bytes(shapes.actor, responses, backend=self._machine.backend, backward=False)
        gathered = max(part.gathered for part in map(self.engine, ("actor", "critic")) if part)
        here = frozenset({SCORE})
        return [
            Row(name="activations", num_bytes=max(s.transient_bytes(tokens, b) for s in models), phases=here),
            Row(name="log-prob head", num_bytes=head, phases=here),
            Row(name="gathered weights", num_bytes=gathered, phases=here),
        ]

    def update(self, name: str) -> list[Row]:
        """Return what the update of `actor` or `critic` adds to its parameters and states, activations as if uncut."""
        part, shape = self.engine(name), getattr(self._shapes, name)
        if part is None:
            return []
        here = frozenset({UPDATE_ACTOR if name == "actor" else UPDATE_CRITIC})
        models, (tokens, responses) = self._config.models, self._update_shares
        activations = shape.activation_bytes(
            tokens,
            self._dtype_bytes,
            checkpointing=models.gradient_checkpointing,
            repeats_keys=repeats_keys(models.attention),
            is_fused=uses_liger(models.fused_layers, shape.model_type, is_half_on_gpu=self._is_half_on_gpu),
        )
        has_entropy, backend = self._config.update.entropy_coef != 0, self._machine.backend
        head = head_bytes(shape, responses, backend=backend, backward=True, has_entropy=has_entropy)
        backward = max(head, shape.transient_bytes(tokens, self._dtype_bytes))
        step = max(0, part.step - activations - backward - part.reduction)
        sizes = {
            "gradients": part.gradients,
            "activations": activations,
            "backward of head or layer": backward,
            "reduction": part.reduction,
            "gathered weights": part.gathered,
            "optimizer step": step,
        }
        return [Row(name=f"{name} {what}", num_bytes=size, phases=here) for what, size in sizes.items()]
