"""Builds the plan of a run: the allocations of every GPU by phase, from the models' shapes and the settings."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from hybrid_rl.config import Config
from hybrid_rl.memory.residency import ROLLOUT, SCORE, SYNC, UPDATE_ACTOR, UPDATE_CRITIC, Phase
from hybrid_rl.models.attention import uses_varlen, repeats_keys
from hybrid_rl.models.fused_layers import uses_liger
from hybrid_rl.planning.footprint import Footprint, Sharding, footprint, forward_tokens, head_bytes, tokens_per_rank
from hybrid_rl.planning.plan import ALWAYS, GIB, Allocation, Machine, Plan, Shapes
from hybrid_rl.planning.shapes import ModelShape
from hybrid_rl.weights.bucket import bucket_bytes, plan_halves
from hybrid_rl.weights.layout import why_not_alias

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


ENGINE_ROWS = frozenset({"engine_weights", "engine_kv_cache"})


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
        allocations=tuple(row for row in [*rows, *others] if row.num_bytes or row.host_bytes),
        machine=machine,
        residency=dict(residency) | dict.fromkeys(stays & residency.keys(), ALWAYS),
        kv_bytes=kv.num_bytes,
        kv_tokens=tokens,
        max_sequences=tokens // planner.full_length,
        wave=planner.wave,
    )


def _settle(tenants: Mapping[str, Allocation], stays: frozenset[str]) -> list[Allocation]:
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
        is_free = uses_varlen(config.models.attention, is_gpu=is_gpu)
        forward = forward_tokens(update, is_free=is_free)
        self._forward_tokens = tokens_per_rank(config, num_sequences=held, max_tokens=forward)
        held = min(held, update.mini_batch_size)  # on one rank just as many, on several never more
        self._update_tokens = tokens_per_rank(config, num_sequences=held, max_tokens=update.micro_batch_tokens)
        dtype = torch.float32 if self._dtype_bytes == 4 else torch.bfloat16
        self._actor_tensors = [(name, shape, dtype) for name, shape in shapes.actor.tensors]
        self._aliases_weights = (
            config.sync.mode != "copy"
            and config.rollout.engine == "vllm"
            and why_not_alias(config, architecture=shapes.actor.architecture, tensors=self._actor_tensors) is None
        )
        """Whether the engine computes with the trainer's weights where they lie, so that they exist once."""
        self.kv_token_bytes = shapes.actor.kv_bytes_per_token(self._dtype_bytes, num_gpus=size)

    def tenants(self) -> dict[str, Allocation]:
        """Return the rows that the residency table may move, and the parameters, as if all of them did."""
        b, shapes = self._dtype_bytes, self._shapes
        rows: dict[str, Allocation] = {}
        engine_weights = b * shapes.actor.num_params // self._config.rollout.tensor_parallel_size
        rows["engine_weights"] = self._tenant("engine_weights", 0 if self._aliases_weights else engine_weights)
        for name, shape in {"reference": shapes.reference, "reward_model": shapes.reward}.items():
            if shape:
                rows[name] = self._tenant(name, b * shape.num_params, back=b * shape.num_params)
        for name in ("actor", "critic"):
            if part := self.engine(name):
                parts = [
                    self._tenant(f"{name}_optimizer", part.states, out=part.moved, back=part.moved),
                    Allocation(name=f"{name} optimizer on the host", num_bytes=0, host_bytes=part.host),
                    Allocation(name=f"{name} buckets", num_bytes=part.kept),
                    self._tenant(f"{name}_parameters", part.weights, out=part.weights, back=part.weights),
                ]
                rows |= {row.name: row for row in parts}
        return rows

    def _tenant(self, name: str, num_bytes: int, *, out: int = 0, back: int = 0) -> Allocation:
        phases = ALWAYS if self._is_fixed(name) else self._residency.get(name, ALWAYS)
        trips = num_entries(phases)
        return Allocation(
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
            or (name == "actor_parameters" and self._aliases_weights)  # the engine has them open
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

    def by_cost(self, tenants: Mapping[str, Allocation]) -> list[frozenset[str]]:
        """Return the rows that move, those that copy most first and the engine, which copies nothing, last."""
        moving = [n for n, row in tenants.items() if row.phases != ALWAYS and n not in ENGINE_ROWS]
        moving.sort(key=lambda n: -(tenants[n].out_bytes + tenants[n].in_bytes))
        return [*(frozenset({name}) for name in moving), ENGINE_ROWS]

    def kv_row(self, rows: list[Allocation]) -> Allocation:
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

    def contexts(self) -> list[Allocation]:
        """Return what is there in every phase, and what the engine computes with."""
        config, plan = self._config, plan_halves(self._actor_tensors, self._config.sync.bucket_bytes)
        num_connections = (config.update.sequence_parallel_size > 1) + (config.rollout.tensor_parallel_size > 1)
        rows = [
            Allocation(name="trainer context", num_bytes=TRAINER_CONTEXT_BYTES),
            Allocation(name="connections", num_bytes=CONNECTION_BYTES * num_connections),
            Allocation(name="staging bucket", num_bytes=0 if self._aliases_weights else bucket_bytes(plan)),
            Allocation(name="checksums", num_bytes=2 * CHECKSUM_BYTES, phases=frozenset({SYNC})),
        ]
        if config.update.tensor_parallel_size > 1 or (config.update.zero_stage == 3 and self._machine.num_ranks > 1):
            largest = max(sum(slot.nbytes for slot in bucket) for bucket in plan)
            rows.append(Allocation(name="gathered weights", num_bytes=largest, phases=frozenset({SYNC})))
        if config.rollout.engine == "vllm":
            engines, graphs = self._machine.engines_per_gpu, 0 if config.rollout.enforce_eager else GRAPHS_LAYER_BYTES
            context = ENGINE_CONTEXT_BYTES + graphs * self._shapes.actor.num_layers
            size = engines * self._engine_activations()
            rows.append(Allocation(name="engine context", num_bytes=engines * context))
            rows.append(Allocation(name="engine activations", num_bytes=size, phases=frozenset({ROLLOUT})))
        return rows

    def _engine_activations(self) -> int:
        """Return an estimate: the widest point of a layer over a prefill batch, and three float32 logits of a batch."""
        shape, rollout = self._shapes.actor, self._config.rollout
        layer = shape.transient_bytes(ENGINE_BATCH_TOKENS, self._dtype_bytes)
        return layer + 3 * 4 * min(self.wave, rollout.max_num_seqs) * shape.vocab_size

    def score(self) -> list[Allocation]:
        """Return what the forwards of SCORE hold at most."""
        shapes, (tokens, responses), b = self._shapes, self._forward_tokens, self._dtype_bytes
        models = [s for s in (shapes.actor, shapes.critic, shapes.reference, shapes.reward) if s]
        head = head_bytes(shapes.actor, responses, backend=self._machine.backend, backward=False)
        gathered = max(part.gathered for part in map(self.engine, ("actor", "critic")) if part)
        here = frozenset({SCORE})
        return [
            Allocation(name="activations", num_bytes=max(s.transient_bytes(tokens, b) for s in models), phases=here),
            Allocation(name="log-prob head", num_bytes=head, phases=here),
            Allocation(name="gathered weights", num_bytes=gathered, phases=here),
        ]

    def update(self, name: str) -> list[Allocation]:
        """Return what the update of `actor` or `critic` adds to its parameters and states, activations as if uncut."""
        part, shape = self.engine(name), getattr(self._shapes, name)
        if part is None:
            return []
        here = frozenset({UPDATE_ACTOR if name == "actor" else UPDATE_CRITIC})
        models, (tokens, responses) = self._config.models, self._update_tokens
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
        return [Allocation(name=f"{name} {what}", num_bytes=size, phases=here) for what, size in sizes.items()]
