"""The command that prints responses of a run."""

import json
import re
from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from launch.rollouts import rollouts


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two steps of four responses, with the rewards 1, 3, 0 and 2."""
    (tmp_path / "rollouts").mkdir()
    for step in (4, 5):
        rows = [
            {
                "prompt_id": number // 2,
                "prompt": "Guess.",
                "response": f"step {step}, response {number}",
                "answer": None,
                "reward": reward,
                "num_tokens": 3,
                "is_truncated": False,
            }
            for number, reward in enumerate([1.0, 3.0, 0.0, 2.0])
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "words, step, numbers",
    [
        ([], 5, [0, 1, 2]),
        (["--step", "4", "--number", "1"], 4, [0]),
        (["--order", "lowest", "--number", "2"], 5, [2, 0]),
        (["--order", "highest", "--number", "9"], 5, [1, 3, 0, 2]),
        (["--prompt", "1"], 5, [2, 3]),
    ],
    ids=["last step", "one of a step", "lowest", "highest", "of a prompt"],
)
def test_responses_are_chosen_by_step_reward_and_prompt(run_dir, words, step, numbers, capsys):
    assert rollouts([str(run_dir), *words], "hybrid-rl rollouts")
    shown = re.findall(r"^step (\d), response (\d)$", capsys.readouterr().out, re.MULTILINE)
    assert shown == [(str(step), str(number)) for number in numbers]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--step", "7"], "--step = 7: .* has the responses of steps 4 to 5"),
        (["--prompt", "9"], "--prompt = 9: step 5 has no response to this prompt"),
        (["--number", "0"], "--number = 0: must be greater than 0"),
    ],
    ids=["step", "prompt", "number"],
)
def test_what_is_not_there_is_named(run_dir, words, message):
    with pytest.raises(ConfigError, match=message):
        rollouts([str(run_dir), *words], "hybrid-rl rollouts")


def test_a_folder_without_rollouts_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there are no responses in .*rollouts; give the folder of a run"):
        rollouts([str(tmp_path)], "hybrid-rl rollouts")
