"""Predicts the duration of each phase of a step from a few rates, to be compared with measurements.

Tokens, operations and bytes are counted with every response at its full length; `Rates` holds everything uncertain.
"""

from dataclasses import dataclass

from hybrid_rl.config import Config
from hybrid_rl.planning.communication_time import bus_seconds, collective_seconds, exchange_seconds, gather_seconds
from hybrid_rl.planning.compute_time import decode_seconds, prefill_seconds, score_seconds, update_seconds
from hybrid_rl.planning.plan import Machine, Plan
from hybrid_rl.planning.rates import Rates
from hybrid_rl.planning.shapes import Shapes
from hybrid_rl.planning.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted duration of one step."""

    phases: dict[str, float]
    """Work -> seconds."""
    num_tokens: int
    """Prompt and response tokens of the step, all ranks."""
    num_ranks: int
    decode_bound: str
    """What limits a decode step: `host` or `bandwidth`."""

    @property
    def total_s(self) -> float:
        """Seconds of the step; nothing overlaps."""
        return sum(self.phases.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens of the step per second and GPU."""
        return self.num_tokens / self.total_s / self.num_ranks

    def efficiency(self, alone: "StepTime") -> float:
        """Return the tokens per second and GPU relative to one GPU with the same settings."""
        return self.tokens_per_s_per_gpu / alone.tokens_per_s_per_gpu


def simulate(config: Config, machine: Machine, shapes: Shapes, plan: Plan, rates: Rates) -> StepTime:
    """Return the predicted duration of a step whose sequences are divided evenly among all ranks."""
    work = Workload(config=config, machine=machine, shapes=shapes)
    decode, decode_bound = decode_seconds(work, plan, rates)
    phases = {
        "rollout: prefill": prefill_seconds(work, rates),
        "rollout: decode": decode,
        "score": score_seconds(work, rates),
        "update critic": update_seconds(work, rates, "critic"),
        "update actor": update_seconds(work, rates, "actor"),
        "sync": rates.sync_s + gather_seconds(work, rates, "actor", times=1),
        "collectives": collective_seconds(work, rates),
        "exchanges": exchange_seconds(work, rates),
        "bus": bus_seconds(plan, config.memory.swap, rates),
    }
    return StepTime(
        phases=phases,
        num_tokens=config.responses_per_step * work.sequence_tokens,
        num_ranks=machine.num_ranks,
        decode_bound=decode_bound,
    )
