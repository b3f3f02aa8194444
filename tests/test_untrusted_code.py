"""No module runs code that data hold: nothing is unpickled, no text is evaluated, no code of a model folder runs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hybrid_rl", "kernels", "launch", "profiling")
MODULES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
OWN_PIPES = (
    "hybrid_rl/engines/vllm/",
    "hybrid_rl/rewards/given.py",
    "profiling/bench_sync.py",
    "profiling/sync_worker.py",
)
"""What talks to vLLM's workers through vLLM's pipes, and sends the functions of a program to its scorer processes over
their socket pairs: all are processes of the same run."""
UNPICKLERS = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
EVALUATORS = {"eval", "exec", "compile"}
SAFE_LOADERS = {"SettingsLoader", "yaml.SafeLoader", "yaml.BaseLoader"}


def name_of(call: ast.Call) -> str:
    """Return what is called, dotted, as far as it is written as names."""
    return ast.unparse(call.func)


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def import_errors(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (f"imports {name}" for name in names if name.split(".")[0] in UNPICKLERS)


def call_errors(tree: ast.AST) -> Iterator[str]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = name_of(call)
        last = name.split(".")[-1]
        if name == "torch.load" and keyword(call, "weights_only") != "True":
            yield "torch.load without weights_only=True"
        if last == "load" and keyword(call, "allow_pickle") not in (None, "False"):
            yield f"{name} with allow_pickle"
        if last == "recv" and not call.args:
            yield f"{name}() unpickles what arrives"
        if (last.endswith("_object") and name.split(".")[0] in ("dist", "torch")) or last.endswith("_object_list"):
            yield f"{name} unpickles what other ranks send"
        if name in EVALUATORS:
            yield f"{name} of a text"
        if name == "yaml.load" and keyword(call, "Loader") not in SAFE_LOADERS:
            yield "yaml.load without the safe loader"
        if last == "from_pretrained" and keyword(call, "trust_remote_code") not in ("False", "trust_remote_code"):
            yield f"{name} without trust_remote_code, of the setting or False"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_runs_no_code_of_data(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = [*call_errors(tree), *([] if path.as_posix().startswith(OWN_PIPES) else import_errors(tree))]
    assert found == []


@pytest.mark.parametrize(
    "source, message",
    [
        ("import pickle", "imports pickle"),
        ("def f():\n    from cloudpickle import loads", "imports cloudpickle"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("np.load(path, allow_pickle=True)", "np.load with allow_pickle"),
        ("connection.recv()", "connection.recv() unpickles"),
        ("dist.all_gather_object(items, item)", "dist.all_gather_object unpickles"),
        ("dist.broadcast_object_list(items)", "dist.broadcast_object_list unpickles"),
        ("eval(text)", "eval of a text"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load without the safe loader"),
        ("AutoTokenizer.from_pretrained(path)", "without trust_remote_code"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "without trust_remote_code"),
    ],
)
def test_code_that_runs_data_is_found(source, message):
    tree = ast.parse(source)
    (found,) = [*import_errors(tree), *call_errors(tree)]
    assert message in found


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "connection.recv(4096)",
        "connection.recv_bytes()",
        "dist.all_gather(parts, part)",
        "model.eval()",
        "torch.compile(model)",
        "re.compile(pattern)",
        "yaml.safe_load(text)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)",
    ],
)
def test_code_that_only_reads_data_passes(source):
    tree = ast.parse(source)
    assert [*import_errors(tree), *call_errors(tree)] == []
