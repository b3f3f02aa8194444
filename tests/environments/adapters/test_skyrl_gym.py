"""Environments of skyrl-gym, registered and of the user, as environments of conversations."""

from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.protocol import Reset, Step
from tests.environments.pools import next_answer

pytest.importorskip("skyrl_gym")

FILE = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Search(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.word, self.max_turns = extras["word"], env_config.get("turns", 5)

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "Go."}], {}

    def step(self, action):
        self.turns += 1
        if action == "raise":
            raise LookupError("no such word")
        is_found = action == self.word
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": "no"}], reward=float(is_found),
            done=is_found or self.turns == self.max_turns, metadata={"turns": self.turns, "word": self.word},
        )
"""
PROMPT = [{"role": "user", "content": "1+1?"}]


def test_a_registered_environment_judges_its_turns_by_the_row():
    row = {"prompt_messages": PROMPT, "reward_spec": {"ground_truth": "2"}}
    arguments = {"id": "gsm8k_multi_turn", "max_turns": 4}
    with EnvironmentPool("skyrl_gym", arguments=arguments, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, row)
        assert next_answer(pool).result == Reset(observation=PROMPT)
        pool.step(1, "it is #### 3")
        wrong = next_answer(pool).result
        assert isinstance(wrong, Step) and wrong.reward == pytest.approx(0.2 / 4) and not wrong.done
        assert wrong.observation[0]["role"] == "user" and "#### ANSWER" in wrong.observation[0]["content"]
        pool.step(1, "it is #### 2")
        right = next_answer(pool).result
        assert isinstance(right, Step) and right.reward == 1.0 and right.done


def test_a_class_of_a_file_gets_its_settings_and_the_row(tmp_path):
    (tmp_path / "search.py").write_text(FILE)
    arguments = {"id": f"{tmp_path}/search.py:Search", "env_config": {"turns": 2}}
    with EnvironmentPool("skyrl_gym", arguments=arguments, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, {"prompt_messages": PROMPT, "word": "yes"})
        assert next_answer(pool).result == Reset(observation=[*PROMPT, {"role": "user", "content": "Go."}])
        pool.step(1, "well")
        no = [{"role": "user", "content": "no"}]
        assert next_answer(pool).result == Step(observation=no, info={"turns": 1})
        pool.step(1, "yes")
        assert next_answer(pool).result == Step(observation=no, reward=1.0, done=True, info={"turns": 2})
        pool.step(1, "raise")
        failure = "step of the environment raises LookupError: no such word (search.py, line 15: raise LookupError("
        assert str(next_answer(pool).failure).startswith(failure)


@pytest.mark.parametrize("name, message", [("no_gym", "No registered env"), ("{file}:Other", "defines no class")])
def test_a_name_that_is_unknown_is_named_at_the_start(tmp_path: Path, name, message):
    (tmp_path / "search.py").write_text(FILE)
    name = name.format(file=tmp_path / "search.py")
    with pytest.raises(ConfigError, match=f"environment.arguments.id = {name}: .*{message}"):
        EnvironmentPool("skyrl_gym", arguments={"id": name}, timeout_s=30, num_workers=1)
