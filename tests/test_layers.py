"""The house rules, read off the syntax tree of every module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    p.relative_to(ROOT) for folder in ("hybrid_rl", "kernels", "launch") for p in (ROOT / folder).rglob("*.py")
)

STEPS = 3  # the layer whose modules never import each other: data passes through the trainer
LAYERS = [
    {
        "config",
        "validate",
        "batch",
        "bucket",
        "layout",
        "metrics",
        "progress",
        "distributed",
        "memory",
        "device_memory",
        "snapshot",
        "phase_log",
    },
    {"advantage", "correction", "loss"},
    {
        "models",
        "packed",
        "sequence_parallel",
        "tensor_parallel",
        "attention",
        "fused_layers",
        "lora",
        "engines",
        "rewards",
        "tables",
        "template",
        "shapes",
        "footprint",
        "planner",
        "advice",
        "simulator",
    },
    {"prompts", "rollout", "judge", "score", "update", "sync", "checkpoint", "average", "ptx", "demo", "record"},
    {"resume", "tenants", "build", "data", "stages", "trainer"},
    {"__main__"},
]
HEAVY = {
    "vllm": {f"hybrid_rl/engines/{name}.py" for name in ("vllm", "vllm_worker", "vllm_scheduler")},
    "deepspeed": {f"hybrid_rl/engines/{name}.py" for name in ("deepspeed", "flat", "shards", "states", "ulysses")},
    "peft": {"hybrid_rl/models/lora.py"},
    "ray": {"launch/ray_cluster.py"},
    "wandb": set(),
    "pynvml": {"hybrid_rl/memory/device.py"},
}
CALLERS = {
    "phase": "hybrid_rl/trainer.py",
    "release": "hybrid_rl/memory/phases.py",
    "restore": "hybrid_rl/memory/phases.py",
}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 400, 60, 90


def layer_of(module: str) -> int | None:
    """Return the layer of `hybrid_rl.<name>...`; None for the package itself and for what is no module of ours."""
    parts = module.split(".")
    if parts[0] != "hybrid_rl" or len(parts) == 1:
        return None
    return next((level for level, names in enumerate(LAYERS) if parts[1] in names), None)


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Yield the dotted name of all that is imported anywhere in a module, `from a import b` as a.b."""
    package = path.parent.parts if path.parts[0] != "kernels" else path.parent.parts[1:]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def import_errors(path: Path, tree: ast.AST) -> Iterator[str]:
    own = ".".join(path.with_suffix("").parts)
    level = layer_of(own)
    for name in imports(tree, path):
        top, target = name.split(".")[0], layer_of(name)
        if top in HEAVY and path.as_posix() not in HEAVY[top]:
            yield f"imports {top}, which stands in {sorted(HEAVY[top]) or 'no file yet'}"
        if path.parts[0] == "kernels" and (top == "hybrid_rl" or top in {"launch", "tests", "profiling"}):
            yield f"imports {name}: kernels import nothing of ours"
        if path.parts[0] != "hybrid_rl" or target is None:
            continue
        if level is None:
            yield f"imports {name}: a package's own __init__ stays empty of imports"
        elif target > level:
            yield f"layer {level} imports {name} of layer {target}"
        elif target == level == STEPS and name.split(".")[1] != own.split(".")[1]:
            yield f"imports {name}: steps never import each other"


def call_errors(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if name in CALLERS and path.as_posix() != CALLERS[name]:
            yield f"line {node.lineno} calls .{name}(), which only {CALLERS[name]} may"


def size_errors(tree: ast.AST, num_lines: int) -> Iterator[str]:
    if num_lines > MAX_FILE_LINES:
        yield f"has {num_lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
            length, limit = node.end_lineno - node.lineno + 1, MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
            if length > limit:
                yield f"{node.name} has {length} lines, more than {limit}"


def place_errors(path: Path) -> Iterator[str]:
    for part in path.with_suffix("").parts:
        if part in {"utils", "common", "manager"} or part.startswith("base_"):
            yield f"{part} says nothing about what is inside"
    if path.parts[0] == "hybrid_rl" and path.as_posix() != "hybrid_rl/__init__.py":
        own = ".".join(path.with_suffix("").parts)
        if layer_of(own) is None:
            yield "stands in no layer: add it to LAYERS"


def errors(path: Path, source: str) -> list[str]:
    """Return every house rule that a module breaks."""
    tree = ast.parse(source)
    found = [*place_errors(path), *import_errors(path, tree), *call_errors(path, tree)]
    return found + list(size_errors(tree, source.count("\n")))


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_keeps_the_house_rules(path):
    assert errors(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "path, source, message",
    [
        ("kernels/hybrid_rl_kernels/gae.py", "import hybrid_rl.config", "nothing of ours"),
        ("hybrid_rl/config.py", "from hybrid_rl import loss", "layer 0 imports hybrid_rl.algorithms.loss of layer 1"),
        (
            "hybrid_rl/algorithms/loss.py",
            "def f():\n    from .engines.hf import HfEngine",
            "layer 1 imports hybrid_rl.engines.huggingface",
        ),
        ("hybrid_rl/rewards/rules.py", "from ..prompts import Prompt", "layer 2 imports hybrid_rl.data.prompts"),
        ("hybrid_rl/steps/rollout.py", "from hybrid_rl.steps.logprobs import score", "steps never import each other"),
        ("hybrid_rl/steps/update.py", "import hybrid_rl.trainer as t", "layer 3 imports hybrid_rl.trainer of layer 4"),
        ("hybrid_rl/__init__.py", "from hybrid_rl.config import Config", "stays empty"),
        ("hybrid_rl/engines/huggingface.py", "import vllm.config", "imports vllm"),
        ("hybrid_rl/engines/vllm/engine.py", "from deepspeed import zero", "imports deepspeed"),
        ("launch/colocated.py", "import ray", "imports ray, which stands in ['launch/ray_cluster.py']"),
        ("hybrid_rl/steps/update.py", "memory.phase(Phase.UPDATE)", "calls .phase()"),
        ("hybrid_rl/trainer.py", "tenant.release()", "calls .release()"),
        ("hybrid_rl/engines/vllm/engine.py", "self.tenant.restore()", "calls .restore()"),
        ("hybrid_rl/report.py", "", "stands in no layer"),
        ("hybrid_rl/engines/utils.py", "", "says nothing"),
        ("hybrid_rl/engines/base_engine.py", "", "says nothing"),
        ("hybrid_rl/algorithms/loss.py", "x = 1\n" * 401, "401 lines"),
        ("hybrid_rl/algorithms/loss.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    ],
)
def test_a_broken_rule_is_found(path, source, message):
    (found,) = errors(Path(path), source)
    assert message in found


@pytest.mark.parametrize(
    "path, source",
    [
        ("hybrid_rl/trainer.py", "from hybrid_rl import __version__, rollout, score\nmemory.phase(Phase.SYNC)"),
        ("hybrid_rl/engines/huggingface.py", "from hybrid_rl.engines import RolloutEngine\nfrom . import Sampling"),
        ("hybrid_rl/memory/phases.py", "tenant.release()\ntenant.restore()"),
        ("hybrid_rl/engines/vllm/engine.py", "import vllm"),
        ("kernels/hybrid_rl_kernels/__init__.py", "from .gae import gae\nfrom hybrid_rl_kernels.logprobs import f"),
        ("launch/colocated.py", "from hybrid_rl.trainer import train"),
        ("kernels/hybrid_rl_kernels/gae.py", "@triton.jit\ndef f():\n" + "    x = 1\n" * 80),
    ],
)
def test_what_the_rules_allow_passes(path, source):
    assert errors(Path(path), source) == []
