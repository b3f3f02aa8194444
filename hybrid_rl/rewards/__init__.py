"""Scores of responses: rule functions in worker processes, HTTP services and reward models, and their normalization.

Worker processes import this package, so it imports no torch; hybrid_rl.rewards.scoring does, and is imported by name.
"""

from hybrid_rl.rewards.normalize import RunningNormalizer
from hybrid_rl.rewards.pool import ScoreResult, ScorerPool
from hybrid_rl.rewards.remote import RemoteScorer
from hybrid_rl.rewards.rules import FUNCTIONS, Scorer

__all__ = ["FUNCTIONS", "RemoteScorer", "RunningNormalizer", "ScoreResult", "Scorer", "ScorerPool"]
