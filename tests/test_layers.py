"""The house rules, read off the syntax tree of every module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    p.relative_to(ROOT) for folder in ("hybrid_rl", "kernels", "launch") for p in (ROOT / folder).rglob("*.py")
)

SPINE = {
    "run",
    "preflight",
    "first_lines",
    "build",
    "frozen_models",
    "trained_models",
    "stages",
    "evaluation",
    "exports",
    "trainer",
}
"""The modules that compose the rooms, so they may import every one."""
BASE = {"config", "errors", "batch", "distributed", "atomic", "serialization", "exchange", "printable", "processes"}
ROOMS: dict[str, set[str]] = {
    **{name: set() for name in BASE},
    "atomic": {"errors"},
    "algorithms.specs": set(),  # a room of its own without torch, which processes that import config do not load
    "config": {
        "algorithms.specs",
        "config_data",
        "config_environment",
        "config_operation",
        "config_training",
        "printable",
    },
    "config_data": set(),
    "config_environment": set(),
    "config_operation": set(),
    "config_training": {"algorithms.specs", "config_data"},
    "exchange": {"config", "errors", "serialization"},
    "distributed": {"config", "errors", "exchange", "printable", "processes"},
    "algorithms": {"batch", "algorithms.specs"},
    "settings": {"config", "config_data", "printable", "algorithms.specs"},
    "validate": {"config", "algorithms.specs", "settings"},
    "monitoring": {*BASE, "config_data", "settings"},
    "memory": {"config", "errors", "distributed", "machine", "monitoring"},
    "machine": {"config", "errors", "distributed"},
    "models": {"config", "errors", "batch", "distributed"},
    "weights": {"config", "errors", "distributed", "serialization", "monitoring"},
    "checkpoints": {*BASE, "config_data", "algorithms.specs", "models", "weights", "rewards"},
    "rewards": {
        "config",
        "errors",
        "batch",
        "distributed",
        "exchange",
        "serialization",
        "printable",
        "processes",
        "algorithms",
        "models",
    },
    "environments": {"config", "errors", "serialization", "printable", "processes", "rewards"},
    "seeds": set(),
    "conversations": {"config", "errors", "batch", "seeds", "data", "engines", "environments"},
    "data": {"config", "errors", "batch", "distributed", "serialization", "models", "rewards"},
    "engines": {
        *("config", "errors", "batch", "distributed", "processes"),
        *("checkpoints", "machine", "memory", "models", "weights"),
    },
    "planning": {"config", "errors", "distributed", "validate", "memory", "models", "weights"},
    "steps": {
        *BASE,
        "seeds",
        "algorithms",
        "algorithms.specs",
        "checkpoints",
        "memory",
        "models",
        "weights",
        "engines",
    },
    "demo": {"config", "config_data", "atomic", "scratch"},
    "scratch": set(),
    "examples": {"config", "demo", "environments"},
}
"""Room (or module of the spine) -> the rooms that it may import besides itself."""
ROOMS |= {name: {*ROOMS, *SPINE} for name in SPINE}
HEAVY = {
    "vllm": "hybrid_rl/engines/vllm/",
    "deepspeed": "hybrid_rl/engines/deepspeed/",
    "peft": "hybrid_rl/models/lora.py",
    "ray": ("launch/ray_cluster.py", "launch/ray_end.py", "launch/ray_plan.py"),
    "pynvml": ("hybrid_rl/memory/device.py", "hybrid_rl/machine/gpus.py"),
}
"""Package that takes seconds to import, or opens the driver -> the folder or files that may import it."""
MOVERS = ("hybrid_rl/memory/phases.py", "hybrid_rl/memory/tenants.py")
CALLERS = {"phase": ("hybrid_rl/trainer.py",), "release": MOVERS, "restore": MOVERS}
"""Method of the memory manager or of a tenant -> the files that may call it."""
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 400, 60, 90


def room_of(module: str) -> str | None:
    """Return the room of `hybrid_rl.<room>...`, the deepest in ROOMS; None for the package and for other packages."""
    parts = module.split(".")
    if parts[0] != "hybrid_rl":
        return None
    return next((room for room in (".".join(parts[1:3]), ".".join(parts[1:2])) if room in ROOMS), None)


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
    room = room_of(own)
    for name in imports(tree, path):
        top, target = name.split(".")[0], room_of(name)
        if top in HEAVY and not path.as_posix().startswith(HEAVY[top]):
            yield f"imports {top}, which only {HEAVY[top]} may"
        if path.parts[0] == "kernels" and (top == "hybrid_rl" or top in {"launch", "tests", "profiling"}):
            yield f"imports {name}: kernels import nothing of ours"
        if path.parts[0] != "hybrid_rl" or target is None:
            continue
        if room is None:
            yield f"imports {name}: a package's own __init__ stays empty of imports"
        elif target != room and target not in ROOMS[room]:
            yield f"imports {name}: {room} may import {', '.join(sorted(ROOMS[room])) or 'no other room'}"
        elif room == "steps" and target == "steps" and name.split(".")[2] != own.split(".")[2]:
            yield f"imports {name}: steps never import each other"
        elif room == "steps" and target == "engines" and name.count(".") > 2:
            yield f"imports {name}: steps know the protocols of engines, not the implementations"


def launch_errors(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        if path.parts[0] == "launch" and any(name.split(".")[0] == "launch" for name in names):
            yield f"imports {names[0]} by its absolute name: import it relatively, as a wheel has it in hybrid_rl"


def call_errors(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if name in CALLERS and path.as_posix() not in CALLERS[name]:
            yield f"line {node.lineno} calls .{name}(), which only {' and '.join(CALLERS[name])} may"


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
        if room_of(own) is None:
            yield "lies in no room: add it to ROOMS"


def errors(path: Path, source: str) -> list[str]:
    """Return every house rule that a module breaks."""
    tree = ast.parse(source)
    found = [*place_errors(path), *import_errors(path, tree), *launch_errors(path, tree)]
    return found + list(call_errors(path, tree)) + list(size_errors(tree, source.count("\n")))


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_keeps_the_house_rules(path):
    assert errors(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "path, source, message",
    [
        ("kernels/hybrid_rl_kernels/gae.py", "import hybrid_rl.config", "nothing of ours"),
        ("hybrid_rl/config.py", "from hybrid_rl.algorithms import loss", "config may import algorithms.specs"),
        (
            "hybrid_rl/algorithms/loss.py",
            "def f():\n    from ..engines import Sampling",
            "algorithms may import algorithms.specs, batch",
        ),
        ("hybrid_rl/weights/sync.py", "from hybrid_rl.engines import RolloutEngine", "weights may import config"),
        ("hybrid_rl/rewards/rules.py", "from ..data.prompts import Prompt", "rewards may import"),
        ("hybrid_rl/steps/rollout.py", "from hybrid_rl.steps.logprobs import score", "steps never import each other"),
        ("hybrid_rl/steps/update.py", "from hybrid_rl.engines.deepspeed.engine import X", "the protocols of engines"),
        ("hybrid_rl/steps/update.py", "import hybrid_rl.trainer as t", "imports hybrid_rl.trainer: steps may import"),
        ("hybrid_rl/__init__.py", "from hybrid_rl.config import Config", "stays empty"),
        ("hybrid_rl/engines/huggingface.py", "import vllm.config", "imports vllm"),
        ("hybrid_rl/engines/vllm/engine.py", "from deepspeed import zero", "imports deepspeed"),
        ("launch/colocated.py", "import ray", "imports ray, which only"),
        ("launch/data.py", "from launch.settings import prepare", "import it relatively"),
        ("hybrid_rl/steps/update.py", "memory.phase(Phase.UPDATE)", "calls .phase()"),
        ("hybrid_rl/trainer.py", "tenant.release()", "calls .release()"),
        ("hybrid_rl/engines/vllm/engine.py", "self.tenant.restore()", "calls .restore()"),
        ("hybrid_rl/report.py", "", "lies in no room"),
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
        ("hybrid_rl/trainer.py", "from hybrid_rl import __version__, build, stages\nmemory.phase(Phase.SYNC)"),
        ("hybrid_rl/config.py", "from hybrid_rl.algorithms.specs import ESTIMATORS"),
        ("hybrid_rl/steps/update.py", "from hybrid_rl.engines import TrainEngine"),
        ("hybrid_rl/engines/huggingface.py", "from hybrid_rl.engines import RolloutEngine\nfrom . import Sampling"),
        ("hybrid_rl/memory/phases.py", "tenant.release()\ntenant.restore()"),
        ("hybrid_rl/engines/vllm/engine.py", "import vllm"),
        ("kernels/hybrid_rl_kernels/__init__.py", "from .gae import gae\nfrom hybrid_rl_kernels.logprobs import f"),
        ("launch/colocated.py", "from hybrid_rl.trainer import train\nfrom .settings import prepare"),
        ("kernels/hybrid_rl_kernels/gae.py", "@triton.jit\ndef f():\n" + "    x = 1\n" * 80),
    ],
)
def test_what_the_rules_allow_passes(path, source):
    assert errors(Path(path), source) == []


def test_rooms_form_no_cycle():
    order: list[str] = []
    rooms = {room: allowed - {room} for room, allowed in ROOMS.items() if room not in SPINE}
    while rooms:
        free = sorted(room for room, allowed in rooms.items() if allowed <= set(order))
        assert free, f"these import each other: {sorted(rooms)}"
        order += free
        rooms = {room: allowed for room, allowed in rooms.items() if room not in free}
