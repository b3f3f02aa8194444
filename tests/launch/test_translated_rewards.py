"""Reward files of other trainers, as their command lines name them, score in scorer processes without a change."""

import pytest
import yaml

from hybrid_rl.rewards import ScorerPool
from launch.translate.command import translate
from launch.translate.systems import SYSTEMS
from tests.conftest import make_rollout

FILES = {
    "--from-openrlhf": (
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset p.jsonl "
        "--data.label_key label --reward.remote_url reward_func.py",
        "reward_func.py",
        "import torch\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]\n"
        "    reward = torch.tensor([float(text == label) for text, label in zip(texts, labels)])\n"
        "    return {'rewards': reward, 'scores': reward, 'extra_logs': {'dummy_scores': reward}}\n",
    ),
    "--from-verl": (
        "python3 -m verl.trainer.main_ppo data.train_files=p.parquet actor_rollout_ref.model.path=m "
        "custom_reward_function.path=score.py custom_reward_function.name=compute_score",
        "score.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': solution_str == ground_truth}\n",
    ),
    "--from-trl": (
        "trl grpo --model_name_or_path m --dataset_name p --reward_funcs lib.rewards.matches",
        "lib/rewards.py",
        "def matches(prompts, completions, answer, **kwargs):\n"
        "    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]\n",
    ),
}


@pytest.mark.parametrize("option", FILES)
def test_the_file_of_a_command_line_scores_as_it_is(tmp_path, monkeypatch, option):
    command, name, text = FILES[option]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    settings = yaml.safe_load(translate(SYSTEMS[option], [command]).text)
    functions = settings["reward"]["functions"]
    rollouts = [make_rollout(sequence_id=n, prompt_text="3+4=", text=t, answer="7") for n, t in enumerate(("7", "8"))]
    with ScorerPool(functions, timeout_s=60, num_workers=1, on_error="raise") as pool:
        assert pool.score(rollouts).per_function == {functions[0]: [1, 0]}
