"""What the Ray launcher gives to workers, and what it says about their failures."""

import pickle

import pytest
from ray.exceptions import ActorDiedError
from ray.train import TrainingFailedError
from ray.train.v2.api.exceptions import WorkerGroupError

from hybrid_rl.config import Config, ConfigError, RewardConfig
from hybrid_rl.errors import EngineLostError, RankLostError
from launch import ray_cluster

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "1",
    "GLOO_SOCKET_IFNAME": "eth1",
    "HF_HOME": "/models",
    "HF_TOKEN": "hf_1",
    "HOME": "/home/me",
    "HUGGING_FACE_HUB_TOKEN": "hf_2",
    "JUDGE_URL_TOKEN": "judge",
    "NCCL_DEBUG": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_API_KEY": "vllm",
}


def test_tokens_reach_workers_without_the_environment_that_ray_logs():
    assert ray_cluster.job_environment(ENVIRONMENT).keys() == {
        *("GLOO_SOCKET_IFNAME", "HF_HOME", "NCCL_DEBUG", "PYTHONPATH", "TOKENIZERS_PARALLELISM")
    }
    config = Config(reward=RewardConfig(environment_variables=["JUDGE_URL_TOKEN", "NOT_SET"]))
    secrets = ray_cluster.secrets(config, ENVIRONMENT)
    assert secrets.values == {
        "HF_TOKEN": "hf_1",
        "HUGGING_FACE_HUB_TOKEN": "hf_2",
        "JUDGE_URL_TOKEN": "judge",
        "VLLM_API_KEY": "vllm",
    }
    assert pickle.loads(pickle.dumps(secrets)).values == secrets.values


def test_the_text_of_a_job_shows_no_secret():
    secrets = ray_cluster.secrets(Config(), ENVIRONMENT)
    assert repr({"secrets": secrets}) == "{'secrets': Secrets(HF_TOKEN, HUGGING_FACE_HUB_TOKEN, VLLM_API_KEY)}"


@pytest.mark.parametrize(
    "addresses, environment, is_open",
    [
        (["10.0.0.1", "10.0.0.2"], {}, True),
        (["10.0.0.1", "10.0.0.2"], {"RAY_AUTH_MODE": "disabled"}, True),
        (["10.0.0.1", "10.0.0.2"], {"RAY_AUTH_MODE": "token"}, False),
        (["10.0.0.1", "10.0.0.1"], {}, False),
    ],
)
def test_several_machines_without_a_token_are_one_warning(caplog, addresses, environment, is_open):
    ray_cluster.warn_of_open_ports(addresses, environment)
    assert [("2 machines" in message and "RAY_AUTH_MODE=token" in message) for message in caplog.messages] == (
        [True] * is_open
    )


LOST = RankLostError("rank 1 (pid 7 on a) has ended; rank 0 waits for it in rollout of step 3")


@pytest.mark.parametrize(
    "failures, code, sentences",
    [
        ({0: ConfigError("a = 1: wrong"), 1: ConfigError("a = 1: wrong", "b = 2: wrong")}, 2, ["a = 1", "b = 2"]),
        ({0: LOST, 1: EngineLostError("the engine is lost")}, 3, ["the engine is lost"]),
        ({0: LOST, 1: ActorDiedError(), 2: RankLostError("rank 1 (pid 7 on a) has ended")}, 6, [str(LOST)]),
        ({1: ActorDiedError()}, 6, ["rank 1 has ended: Ray lost its worker, whose last lines are above"]),
        ({1: ZeroDivisionError("by zero"), 0: LOST}, 1, ["rank 1: ZeroDivisionError: by zero"]),
    ],
    ids=["findings", "own error", "lost rank", "dead worker", "other error"],
)
def test_a_failure_is_told_once_with_its_exit_code(failures, code, sentences, capsys):
    assert ray_cluster.report_failure(WorkerGroupError("much text", failures)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(sentences)
    assert all(line.startswith(f"error: {start}") for line, start in zip(lines, sentences, strict=True))


def test_a_failure_of_ray_itself_is_one_line(capsys):
    assert ray_cluster.report_failure(TrainingFailedError("first\nsecond")) == 1
    assert capsys.readouterr().err == "error: first second\n"
