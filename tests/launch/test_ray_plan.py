"""The machine of a Ray cluster, from what its nodes tell, and a plan for a real cluster."""

import subprocess
import sys

import pytest
import yaml
from ray.cluster_utils import Cluster

from hybrid_rl.planning.plan import GIB
from launch.machine_options import DEFAULT_BYTES
from launch.ray_plan import Node, machine_of_nodes
from tests.programs import ROOT

H100 = ("NVIDIA H100 80GB HBM3", 85_000_000_000)


def node(num_gpus: int, *gpus: tuple[str, int], memory_bytes: int = 512 * GIB) -> Node:
    return Node(num_gpus=num_gpus, gpus=gpus, memory_bytes=memory_bytes)


def test_equal_nodes_with_one_kind_of_gpu_are_a_known_machine():
    found = machine_of_nodes([node(2, H100, H100), node(2, H100, (H100[0], 84 * 10**9), memory_bytes=256 * GIB)])
    assert (found.num_gpus, found.num_nodes, found.card.name) == (2, 2, "h100")
    assert (found.gpu_memory_bytes, found.host_memory_bytes) == (84 * 10**9, 256 * GIB)


@pytest.mark.parametrize(
    "nodes, num_gpus, memory",
    [
        ([node(1, H100), node(1, ("NVIDIA H200", 150 * 10**9))], 1, 85 * 10**9),
        ([node(1, ("Tesla T4", 16 * 10**9)), node(1, ("Tesla T4", 16 * 10**9))], 1, 16 * 10**9),
        ([node(4), node(4)], 4, DEFAULT_BYTES),
    ],
    ids=["two kinds", "a kind that is not known", "no driver"],
)
def test_other_clusters_have_an_unknown_card(nodes, num_gpus, memory):
    found = machine_of_nodes(nodes)
    assert (found.card, found.num_gpus, found.num_nodes, found.gpu_memory_bytes) == (None, num_gpus, 2, memory)


def test_nodes_with_different_numbers_of_gpus_count_as_one():
    found = machine_of_nodes([node(3, H100), node(1, H100)])
    assert (found.num_gpus, found.num_nodes) == (4, 1)


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/ray_cluster.py", "plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_ray_command_plans_for_options_and_for_a_running_cluster(qwen_7b, tmp_path, monkeypatch):
    """Ray counts four GPUs on each of two nodes, of which the driver knows nothing."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    qwen_7b.save_pretrained(tmp_path / "7b")
    settings = {
        "models": {"actor": str(tmp_path / "7b"), "gradient_checkpointing": True},
        "prompts": {"path": "train.jsonl", "max_prompt_tokens": 512},
        "rollout": {"rollout_batch_size": 128, "group_size": 8, "max_response_tokens": 1536},
        "reward": {"functions": ["math"]},
        "advantage": {"estimator": "grpo"},
        "update": {"mini_batch_size": 256, "micro_batch_tokens": 8192},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    common = ["--config", str(tmp_path / "my.yaml"), "--gpu", "h200", "--host-memory", "1TiB"]
    given = plan(*common, "--gpus", "4", "--nodes", "2")
    assert given.returncode == 0, given.stderr
    assert "GiB on each GPU of 140.4 GiB (h200), 8 in all" in given.stdout
    colocated = [sys.executable, "launch/colocated.py", "plan", *common, "--gpus", "4", "--nodes", "2"]
    assert subprocess.run(colocated, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout == given.stdout
    gpus = {"num_cpus": 1, "num_gpus": 4, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**gpus, "include_dashboard": False})
    try:
        cluster.add_node(**gpus)
        found = plan(*common, "--address", cluster.address)
    finally:
        cluster.shutdown()
    assert found.stdout == given.stdout and found.returncode == 0, found.stderr
