"""What a response is worth: rule functions in killable processes, HTTP services, what they share. Imports no torch."""

from hybrid_rl.rewards.normalize import RunningNormalizer
from hybrid_rl.rewards.pool import ScoreResult, ScorerPool
from hybrid_rl.rewards.remote import RemoteScorer
from hybrid_rl.rewards.rules import FUNCTIONS, Scorer, load_scorer

__all__ = ["FUNCTIONS", "RemoteScorer", "RunningNormalizer", "ScoreResult", "Scorer", "ScorerPool", "load_scorer"]
