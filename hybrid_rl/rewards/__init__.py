"""What a response is worth: rule functions, and the killable processes in which they run. Imports no torch."""

from hybrid_rl.rewards.pool import ScoreResult, ScorerPool
from hybrid_rl.rewards.rules import FUNCTIONS, Scorer, load_scorer

__all__ = ["FUNCTIONS", "ScoreResult", "Scorer", "ScorerPool", "load_scorer"]
