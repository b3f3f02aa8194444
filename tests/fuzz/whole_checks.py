"""Fuzz subject: the check of a whole run, with several mistakes at once, each of which must be reported."""

import json
import random
from pathlib import Path
from typing import Any

from launch.check import check_run, site_here
from tests.conftest import VALID_CONFIG, change
from tests.fuzz.cases import Refusal, check_refused, outcome
from tests.fuzz.model_folders import whole_folder

UNKNOWN = "held-out row of ids that the model does not have"
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"prompts.path": "missing.jsonl"}, "prompts.path"),
    "held-out row without an answer": ({"prompts.eval_path": "EVAL"}, "prompts.eval_path"),
    UNKNOWN: ({"prompts.eval_path": "UNKNOWN"}, "vocabulary"),
    "no reward model": ({"models.reward": "missing-folder"}, "models.reward"),
    "no template": ({"prompts.template_path": "missing.json"}, "prompts.template_path"),
    "unknown function": ({"reward.functions": ["exact_matches"]}, "reward.functions"),
    "missing reward file": ({"reward.functions": ["missing.py:score"]}, "reward.functions"),
    "temperature of 0": ({"rollout.temperature": 0.0}, "rollout.temperature"),
    "batch that does not divide": ({"update.mini_batch_size": 3}, "update.mini_batch_size"),
    "more ranks than there are": ({"update.sequence_parallel_size": 2}, "update.sequence_parallel_size"),
    "too long for the model": ({"rollout.max_response_tokens": 200}, "max_response_tokens"),
    "no texts": ({"ptx.path": "missing.txt"}, "ptx.path"),
    "unknown schedule": ({"update.actor.schedule": "cubic"}, "update.actor.schedule"),
    "prompts too long": ({"prompts.max_prompt_tokens": 1}, "max_prompt_tokens"),
}
"""Mistake -> the settings that make it, and what its sentence must name."""
APART = [
    {"unknown function", "missing reward file"},
    {"no data", "prompts too long"},
    {"no template", "prompts too long"},
    {UNKNOWN, "no template"},
    {UNKNOWN, "held-out row without an answer"},
    {UNKNOWN, "prompts too long"},
]
"""Mistakes of which one hides the other, or replaces it."""


def check_whole_run(rng: random.Random, folder: Path) -> None:
    """A run without mistakes is accepted; of several mistakes each is in the findings."""
    rows = [{"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3)} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "EVAL").with_suffix(".jsonl").write_text('{"prompt": "1+1="}\n')
    (folder / "UNKNOWN").with_suffix(".jsonl").write_text('{"prompt": "z+1=", "answer": "5"}\n')
    settings: dict[str, Any] = {
        "run.dir": str(folder),
        "models.actor": str(whole_folder(rng.choice(["small", "qwen2"]))),
        "prompts.path": str(folder / "rows.jsonl"),
        "prompts.max_prompt_tokens": 16,
        "rollout.engine": "hf",
        "rollout.rollout_batch_size": 4,
        "rollout.max_response_tokens": 8,
        "update.mini_batch_size": 4,
        "advantage.estimator": "reinforce_pp",
    }
    mistakes = rng.sample(sorted(MISTAKES), rng.choice([0, 1, 2, 3]))
    for pair in APART:
        if pair <= set(mistakes):
            mistakes.remove(sorted(pair)[0])
    for mistake in mistakes:
        settings |= MISTAKES[mistake][0]
    if "prompts.eval_path" in settings:
        settings["prompts.eval_path"] = str(folder / f"{settings['prompts.eval_path']}.jsonl")
    if UNKNOWN in mistakes:
        settings["models.actor"] = str(whole_folder("small"))
    config = change(VALID_CONFIG, settings)
    found = outcome(lambda: check_run(config, site_here(1)))
    if not mistakes:
        assert not isinstance(found, Refusal), f"refuses a run without mistakes: {found}"
        assert len(found.data.loader.next_batch()) == 4
        return
    check_refused(found, str(mistakes))
    for mistake in mistakes:
        name = MISTAKES[mistake][1]
        assert any(name in message for message in found.messages), f"{mistake} is not among {found.messages}"
