"""`colocated.py plan`: the real command, on a folder that holds only the config.json of a 7B model."""

import re

import pytest
import yaml

from hybrid_rl.config import ConfigError
from launch.machine_options import parse_bytes


@pytest.fixture(scope="module")
def settings(tmp_path_factory, qwen_7b):
    root = tmp_path_factory.mktemp("plan")
    qwen_7b.save_pretrained(root / "7b")
    config = {
        "models": {"actor": str(root / "7b")},
        "prompts": {"path": "train.jsonl", "max_prompt_tokens": 512},
        "rollout": {"rollout_batch_size": 128, "group_size": 8, "max_response_tokens": 1536},
        "reward": {"functions": ["math"]},
        "advantage": {"estimator": "grpo", "kl_coef": 0.001, "kl_in": "loss", "kl_estimator": "k3"},
        "update": {"mini_batch_size": 256, "micro_batch_tokens": 8192},
    }
    config["rollout"]["kv_cache_memory_bytes"] = None
    (root / "grpo.yaml").write_text(yaml.safe_dump(config))
    return str(root / "grpo.yaml")


def test_the_suggestion_of_a_plan_that_does_not_fit_does_fit(run_forked, settings):
    command = [
        "launch/colocated.py",
        "plan",
        "--config",
        settings,
        "--gpu",
        "h100",
        "--gpus",
        "8",
        "--gpu-memory",
        "80GB",
    ]
    ended = run_forked(*command)
    assert ended.code == 1, ended.output
    assert re.search(r"does not fit: phase update_actor needs [\d,]+ bytes .* [\d,]+ bytes missing", ended.output)
    change = re.search(r"this would fit: (--.+)", ended.output)[1].split()
    again = run_forked(*command, *change)
    assert again.code == 0, again.output
    assert re.search(r"fits: \w+ is the fullest phase", again.output)
    assert re.search(r"KV cache: [\d,]+ bytes = [\d,]+ tokens = 128 sequences of 2048", again.output)
    for line in ("actor_optimizer", "peak", "host memory, pinned", "bus per step", "rollout: decode", "update actor"):
        assert line in again.output


def test_a_plan_with_room_names_larger_micro_batches_that_are_faster(run_forked, settings):
    command = [
        "launch/colocated.py",
        "plan",
        "--config",
        settings,
        "--gpu",
        "h100",
        "--gpus",
        "8",
        "--gpu-memory",
        "80GB",
    ]
    command += ["--models.gradient_checkpointing", "true", "--update.micro_batch_tokens"]
    found = re.compile(r"fit too, and take ([\d.]+) s a step instead of ([\d.]+): --update.micro_batch_tokens (\d+)")
    first = run_forked(*command, "2048")
    assert first.code == 0, first.output
    less, more, tokens = found.search(first.output).groups()
    again = run_forked(*command, tokens)
    assert again.code == 0, again.output
    step = float(re.search(r"^\W*step\W+([\d.]+)", again.output, re.MULTILINE)[1])
    assert step == pytest.approx(float(less), abs=0.06) and step < 0.95 * float(more)
    assert int(tokens) % 4096 == 0 and not found.search(again.output)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpu-memory", "80 apples"], "error: --gpu-memory = 80 apples: must be a size such as 80GiB"),
        (["--rollout.tensor_parallel_size", "2"], "error: rollout.tensor_parallel_size = 2: must divide --gpus 1"),
        (["--update.sequence_parallel_size", "2"], "error: update.sequence_parallel_size = 2: must divide --gpus 1"),
        (["--gpus", "0"], "error: --gpus"),
        (["--gpu", "rtx3090"], "error: --gpu rtx3090: must be one of rtx4090, a10, l40s, a100-40, a100-80, h100"),
        (["--models.actor", "/nowhere"], "error: models.actor = /nowhere: no Hugging Face model there"),
    ],
)
def test_arguments_that_cannot_be_planned_are_reported_in_one_sentence(run_forked, settings, arguments, message):
    ended = run_forked("launch/colocated.py", "plan", "--config", settings, *arguments)
    assert ended.code == 2, ended.output
    assert message in ended.output and "Traceback" not in ended.output


def test_memory_alone_is_an_unknown_card_without_seconds(run_forked, settings):
    ended = run_forked("launch/colocated.py", "plan", "--config", settings, "--gpus", "8", "--gpu-memory", "200GiB")
    assert ended.code == 0, ended.output
    assert "seconds are not predicted: the card is unknown; name it with --gpu (rtx4090, a10," in ended.output
    assert re.search(r"bus per step by memory.swap, all tenants moving: vmm [\d.]+ GiB", ended.output)
    assert "rollout: decode" not in ended.output and "tokens per second" not in ended.output


def test_a_start_that_needs_more_host_memory_than_a_node_has_does_not_fit(run_forked, settings):
    command = ["launch/colocated.py", "plan", "--config", settings, "--gpus", "8", "--gpu-memory", "200GiB"]
    needed = 8 * 2 * 7_615_616_512  # each rank loads the model in host memory, and nothing is pinned
    ended = run_forked(*command, "--host-memory", str(needed - 1))
    assert ended.code == 1, ended.output
    moment = "the start, at actor, moved into the shared buffer,"
    assert f"does not fit: {moment} needs {needed:,} bytes (113.5 GiB) of host memory per node" in ended.output
    assert run_forked(*command, "--host-memory", str(needed)).code == 0


@pytest.mark.parametrize(
    "text, num_bytes",
    [("80GiB", 80 << 30), ("40GB", 40 * 10**9), ("1.5 kib", 1536), ("85899345920", 80 << 30), ("2TB", 2 * 10**12)],
)
def test_sizes_with_units(text, num_bytes):
    assert parse_bytes(text, field="--gpu-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "80 G", "1e9", "8GiB8"])
def test_text_that_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError, match=r"--gpu-memory = .*: must be a size such as 80GiB"):
        parse_bytes(text, field="--gpu-memory")
