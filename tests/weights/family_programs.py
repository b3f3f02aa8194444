"""Programs that compare engines for several families of models, and the gap of an engine's log-probs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.models.packed import Actor, packed_inputs
from tests.conftest import make_rollout
from tests.programs import PATHS, ROOT


def run_families(program: str, *arguments: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Return the results of a program for each family; vLLM changes classes of transformers in its process.

    Args:
        program: module of the program, which prints the results as its last line.
    """
    ended = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=ROOT,
        env=os.environ | PATHS,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@torch.no_grad()
def logprob_gaps(
    actor: Actor, prompts: Sequence[list[int]], responses: Sequence[dict[str, Any]], device: torch.device
) -> Tensor:
    """Return |engine - trainer| of the log-prob of each token of an engine's responses, [N] float32."""
    rollouts = [
        make_rollout(ids, found["token_ids"], prompt_id=row, rollout_logprobs=found["logprobs"], is_truncated=True)
        for row, (ids, found) in enumerate(zip(prompts, responses, strict=True))
    ]
    packed = pack(make_train_batch(rollouts), list(range(len(rollouts))), device)
    ours, _ = actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0)
    return (ours - torch.tensor([value for found in responses for value in found["logprobs"]], device=device)).abs()
