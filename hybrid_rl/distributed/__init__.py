"""The ranks of a run: how they meet, what they exchange, and how each notices that another one is lost."""

from hybrid_rl.distributed.joining import free_port, join_world, leave_world
from hybrid_rl.distributed.watch import begin_to_end, end_for_lost_rank, show_work
from hybrid_rl.distributed.world import World

__all__ = ["World", "begin_to_end", "end_for_lost_rank", "free_port", "join_world", "leave_world", "show_work"]
