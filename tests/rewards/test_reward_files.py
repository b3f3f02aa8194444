"""Reward files of users: what they may import, how often they are imported, and how their errors are reported."""

import hashlib
import os
import re
import sys
import time
from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.rewards import ScorerPool, process
from hybrid_rl.rewards.loading import reward_file_hashes
from tests.conftest import make_rollout


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return a function that writes files, from relative paths to texts, into the working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda texts: write(tmp_path, texts)


def scores(*names, num=1, num_workers=1):
    """Return function -> scores of responses with the texts 0, 1, ..."""
    rollouts = [make_rollout(prompt_id=n, text=str(n), answer="0") for n in range(num)]
    with ScorerPool(names, timeout_s=60, num_workers=num_workers, on_error="raise") as pool:
        return pool.score(rollouts).per_function


def error_of(*names, **arguments):
    with pytest.raises(ConfigError) as caught:
        ScorerPool(names, **{"timeout_s": 60, "num_workers": 1, "on_error": "zero", **arguments})
    return str(caught.value)


# Imports


def test_a_file_is_imported_once_per_process_and_its_functions_share_its_state(files):
    files(
        {
            "a.py": "open('imports.txt', 'a').write('once\\n')\nseen = []\n"
            "def remember(prompt, response): seen.append(response); return 0\n"
            "def recall(prompt, response): return len(seen)\n"
        }
    )
    found = scores("a.py:remember", "./a.py:recall", "exact_match", num=3)
    assert found["./a.py:recall"] == [1, 2, 3]
    assert Path("imports.txt").read_text() == "once\n"


def test_the_process_that_checks_a_file_scores_the_responses(files):
    files({"a.py": "import os\ndef process_id(prompt, response): return os.getpid()\n"})
    with ScorerPool(["a.py:process_id"], timeout_s=60, num_workers=1, on_error="raise") as pool:
        (process_id,) = pool.process_ids
        assert pool.score([make_rollout()]).scores == [process_id] and process_id != os.getpid()


def test_the_trainers_process_does_not_run_a_reward_file(files):
    files(
        {
            "a.py": "import os\nos.environ['RAN'] = '1'\nopen(f'{os.getpid()}.txt', 'w')\n"
            "def f(prompt, response): return 1\n"
        }
    )
    before = set(sys.modules)
    assert scores("a.py:f") == {"a.py:f": [1]}
    assert "RAN" not in os.environ and not Path(f"{os.getpid()}.txt").exists()
    assert not {"a", "reward_file_a"} & (set(sys.modules) - before)


def test_a_file_imports_its_neighbours_and_reads_data_beside_it(files):
    files(
        {
            "lib/a.py": "from pathlib import Path\nimport tables\n"
            "from parts.inner import TWO\nfrom plain.deep import FOUR\n"
            "def f(prompt, response):\n    import late\n"
            "    return tables.ONE + TWO + FOUR + late.EIGHT + int(Path(__file__).with_name('data.txt').read_text())\n",
            "lib/tables.py": "import a\nONE = 1\n",
            "lib/parts/__init__.py": "",
            "lib/parts/inner.py": "from . import __name__ as name\nTWO = 2\n",
            "lib/plain/deep.py": "FOUR = 4\n",
            "lib/late.py": "EIGHT = 8\n",
            "lib/data.txt": "16",
        }
    )
    assert scores("lib/a.py:f") == {"lib/a.py:f": [31]}


def test_files_of_the_same_name_in_two_folders_have_their_own_neighbours(files):
    text = (
        "import helper\nSTATE = [helper.VALUE]\n"
        "def f(prompt, response):\n    import late\n    return 10 * helper.VALUE + late.VALUE + STATE[0] / 10\n"
    )
    for name, value in {"one": 1, "two": 2}.items():
        files(
            {f"{name}/r.py": text, f"{name}/helper.py": f"VALUE = {value}\n", f"{name}/late.py": f"VALUE = {value}\n"}
        )
    assert scores("one/r.py:f", "two/r.py:f", num=2) == {"one/r.py:f": [11.1] * 2, "two/r.py:f": [22.2] * 2}


@pytest.mark.parametrize("name", ["math", "json", "torch", "requests", "helper", "hybrid_rl", "my-rewards", "v1.2"])
def test_a_file_may_be_named_like_a_library(files, name):
    """The library stays what the name means, also for the file itself and its neighbours."""
    files(
        {
            f"{name}.py": "import json, math, neighbour\n"
            "def f(prompt, response): return math.sqrt(4) + len(json.dumps({})) + neighbour.ONE\n",
            "neighbour.py": "import requests\nassert requests.post\nfrom json import loads\nONE = loads('1')\n",
        }
    )
    assert scores(f"{name}.py:f") == {f"{name}.py:f": [5]}


def test_a_neighbour_named_like_an_installed_package_is_taken_and_said(files, capfd):
    files({"a.py": "import yaml\ndef f(prompt, response): return yaml.MINE\n", "yaml.py": "MINE = 3\n"})
    assert scores("a.py:f") == {"a.py:f": [3]}
    assert f"import yaml takes {Path('yaml.py').absolute()}, which hides " in capfd.readouterr().err


def test_a_folder_of_data_named_like_a_package_hides_nothing(files):
    files({"a.py": "import yaml\ndef f(prompt, response): return yaml.safe_load('7')\n", "yaml/data.txt": ""})
    assert scores("a.py:f") == {"a.py:f": [7]}


def test_a_file_in_a_package_uses_relative_and_absolute_imports(files):
    files(
        {
            "work/mine/__init__.py": "BASE = 1\n",
            "work/mine/sub/__init__.py": "",
            "work/mine/sub/r.py": "from .. import BASE\nfrom .near import TWO\nimport mine.sub.near as near\n"
            "import far\ndef f(prompt, response): return BASE + TWO + far.FOUR + 8 * (near.TWO is TWO)\n",
            "work/mine/sub/near.py": "TWO = 2\n",
            "work/mine/sub/far.py": "FOUR = 4\n",
        }
    )
    assert scores("work/mine/sub/r.py:f") == {"work/mine/sub/r.py:f": [15]}


def test_a_package_named_like_another_module_is_refused(files):
    files({"email/__init__.py": "", "email/r.py": "def f(prompt, response): return 1\n"})
    assert "its package has the name of another module, email; rename the folder" in error_of("email/r.py:f")


def test_a_path_may_begin_at_the_home_folder(files, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    files({"home/r.py": "def f(prompt, response): return 1\n"})
    assert scores("~/r.py:f") == {"~/r.py:f": [1]}


def test_a_link_to_a_file_is_the_file(files):
    files({"real/r.py": "import near\ndef f(prompt, response): return near.ONE\n", "real/near.py": "ONE = 1\n"})
    Path("link.py").symlink_to("real/r.py")
    assert scores("link.py:f") == {"link.py:f": [1]}
    for other in ("link.py:f", "./real/../real/r.py:f", str(Path("real/r.py").absolute()) + ":f"):
        assert "one is listed twice; list each once" in error_of("real/r.py:f", other)


def test_a_reward_file_is_identified_by_its_content(files):
    files({"a.py": "f = max\n", "b.py": "f = max\n"})
    first = reward_file_hashes(["exact_match", "a.py:f", "b.py:f"])
    assert first == dict.fromkeys(["a.py:f", "b.py:f"], hashlib.sha256(b"f = max\n").hexdigest())
    files({"a.py": "f = min\n"})
    second = reward_file_hashes(["a.py:f", "b.py:f"])
    assert second["a.py:f"] != first["a.py:f"] and second["b.py:f"] == first["b.py:f"]


# Errors at load


RAISING = [
    (
        "x = 1\nimport no_such_module\n",
        "ModuleNotFoundError: No module named 'no_such_module' (r.py, line 2: import no_such",
    ),
    (
        "def f(prompt, response)\n    return 1\n",
        "SyntaxError: expected ':' (r.py, line 1: def f(prompt, response))",
    ),
    ("def g():\n    return {}['a']\n\ng()\n", "KeyError: 'a' (r.py, line 2: return {}['a'])"),
    ("import near\n", "ZeroDivisionError: division by zero (near.py, line 2: 1 / 0)"),
    ("import json\njson.loads('')\n", "(char 0) (r.py, line 2: json.loads(''))"),
    ("raise ValueError('two\\nlines')\n", "ValueError: two lines (r.py, line 1: "),
    ("raise ValueError('x' * 10**6)\n", "ValueError: " + "x" * 500 + "... (r.py, line 1: raise"),
    ("x = 1\0\n", "SyntaxError: source code string cannot contain null bytes"),
    ("exit()\n", "SystemExit: None (r.py, line 1: exit())"),
    ("raise KeyboardInterrupt\n", "KeyboardInterrupt (r.py, line 1: "),
    ("from .near import x\n", "ImportError: attempted relative import with no known parent package (r.py, line 1"),
    ("def __getattr__(name): raise RuntimeError(name)\n", "RuntimeError: f (r.py, line 1"),
]
"""Text of r.py, and the end of the message."""


def test_files_that_raise_are_reported_with_the_line(files):
    files({"near.py": "\n1 / 0\n"} | {f"r{n}.py": text for n, (text, _) in enumerate(RAISING)})
    lines = error_of(*[f"r{n}.py:{function}" for n in range(len(RAISING)) for function in "fg"]).splitlines()
    for n, (line, (_, reason)) in enumerate(zip(lines, RAISING, strict=True)):  # one for the two functions of a file
        assert line.startswith(f"reward.functions: 'r{n}.py:f': importing {Path(f'r{n}.py').absolute()} fails with ")
        assert reason.replace("(r.py", f"(r{n}.py") in line


ENDINGS = {
    "os._exit(3)": "ended with exit code 3",
    "os._exit(0)": "ended with exit code 0",
    "os.kill(os.getpid(), signal.SIGSEGV)": "was killed by SIGSEGV",
    "os.kill(os.getpid(), signal.SIGKILL)": "was killed by SIGKILL",
    "os.kill(os.getpid(), signal.SIGSTOP)": "took longer than 2 s",
    "time.sleep(60)": "took longer than 2 s",
    "threading.Thread(target=time.sleep, args=(60,)).start(); os.close(int(sys.argv[1])); time.sleep(60)": "took",
}
"""What a file does when it is imported, and what is said of its process."""


@pytest.mark.parametrize("line", ENDINGS)
def test_a_file_that_ends_its_process_or_hangs_is_reported(files, monkeypatch, line):
    files({"bad.py": f"import os, signal, sys, threading, time\n{line}\n", "a.py": "f = max\n"})
    if "took" in ENDINGS[line]:
        monkeypatch.setattr(process, "START_TIMEOUT_S", 2.0)
    start = time.monotonic()
    message = r"reward\.functions: importing 'bad\.py:f' fails: the scorer process \d+ " + ENDINGS[line]
    assert re.match(message, error_of("a.py:f", "bad.py:f"))
    assert time.monotonic() - start < 30


def test_all_functions_that_cannot_be_used_are_reported_with_their_setting(files):
    files({"a.py": "def f(prompt, response): return 1\ndef _hidden(): pass\nfrom math import sqrt\n"})
    Path("sub").mkdir()
    for names, expected in {
        ("exact", "absent.py:f", "a.py:", "a.py"): 4 * ["x: '"],
        ("a.py:g", "a.py:sqrt"): ["x: 'a.py:g': ", "x: 'a.py:sqrt': "],
    }.items():
        lines = error_of(*names, field="x").splitlines()
        assert len(lines) == len(expected)
        assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))
    assert "'exact' is unknown; give one of exact_match, last_number, " in error_of("exact")
    assert f"there is no file {Path('absent.py').absolute()}" in error_of("absent.py:f")
    assert f"{Path('a.py').absolute()} defines no function 'g'; its functions: f" in error_of("a.py:g")


NOT_CALLABLE = [
    (
        "def f(prompts, answers): return 1",
        "its signature is f(prompts, answers), which is none of: f(prompt, response), f(prompts, responses), Op",
    ),
    ("def f(response): return 1", "its signature is f(response), which is none of"),
    ("def f(*, prompt, response): return 1", "its signature is f(*, prompt, response)"),
    ("def f(response, prompt): return 1", "its signature is f(response, prompt)"),
    ("f = lambda: 1", "its signature is f()"),
    ("async def f(prompt, response): yield 1", "f is a generator, as it contains yield"),
    ("def f(prompt, response): yield 1", "f is a generator, as it contains yield; return the score"),
    ("class f:\n    def __call__(self, prompt, response): return 1", "f is a class; give a function, or an object"),
    ("f = 1", "defines no function 'f'"),
]
"""Text of a file, and what is said of its f."""


def test_what_cannot_be_called_with_prompt_and_response_is_refused_at_load(files):
    files({f"r{n}.py": text + "\n" for n, (text, _) in enumerate(NOT_CALLABLE)})
    lines = error_of(*[f"r{n}.py:f" for n in range(len(NOT_CALLABLE))]).splitlines()
    for n, (line, (_, message)) in enumerate(zip(lines, NOT_CALLABLE, strict=True)):
        assert line.startswith(f"reward.functions: 'r{n}.py:f': ") and message in line


CALLABLE = [
    "f = lambda prompt, response: 1",
    "async def f(prompt, response): return 1",
    "class F:\n    async def __call__(self, prompt, response): return 1\nf = F()",
    "async def g(p, r): return 1\nf = lambda prompt, response: g(prompt, response)",
    "def f(*args): return len(args) - 1",
    "def f(a, b, c=0): return 1",
    "class F:\n    def __call__(self, prompt, response): return 1\nf = F()",
    "import functools\ndef g(k, prompt, response): return k\nf = functools.partial(g, 1)",
    "class F:\n    @staticmethod\n    def g(prompt, response): return 1\nf = F.g",
    "import functools\ndef d(g):\n    @functools.wraps(g)\n    def h(*a): return g(*a)\n    return h\n"
    "@d\ndef f(prompt, response): return 1",
]
"""Texts of files whose f returns 1."""


def test_lambdas_and_callable_objects_are_functions(files):
    files({f"r{n}.py": text + "\n" for n, text in enumerate(CALLABLE)})
    names = [f"r{n}.py:f" for n in range(len(CALLABLE))]
    assert scores(*names) == {name: [1] for name in names}


# What a function may do


def test_a_function_that_changes_the_prompt_changes_nothing_for_others(files):
    files(
        {
            "r.py": "def spoil(prompt, response):\n"
            "    prompt.metadata['k'].append(2)\n    prompt.answer = 'x'\n    return 1\n"
            "def check(prompt, response): return prompt.metadata == {'k': [1]} and prompt.answer == 'a'\n"
        }
    )
    rollout = make_rollout(answer="a")
    rollout.prompt.metadata["k"] = [1]
    with ScorerPool(["r.py:spoil", "r.py:check"], timeout_s=60, num_workers=1, on_error="raise") as pool:
        for _ in range(2):
            assert pool.score([rollout, rollout]).per_function["r.py:check"] == [1, 1]
    assert rollout.prompt.metadata == {"k": [1]}


def test_prints_appear_at_once_on_stderr(files, capfd):
    files({"r.py": "print('loaded')\ndef f(prompt, response): print('scores', response); return 1\n"})
    with ScorerPool(["r.py:f"], timeout_s=60, num_workers=1, on_error="raise") as pool:
        assert "loaded\n" in capfd.readouterr().err
        pool.score([make_rollout(text="abc")])
        out, err = capfd.readouterr()
    assert "scores abc\n" in err and out == ""


def test_a_function_may_close_the_standard_streams(files):
    files({"r.py": "import sys\nsys.stdout.close()\nsys.stderr.close()\ndef f(prompt, response): return 1\n"})
    assert scores("r.py:f", num=2) == {"r.py:f": [1, 1]}


def test_what_a_function_writes_to_files_is_complete_after_close(files):
    files(
        {
            "r.py": "import atexit\nlog = open('log.txt', 'w')\natexit.register(log.write, 'end')\n"
            "def f(prompt, response): log.write(response); return 1\n"
        }
    )
    scores("r.py:f", num=3)
    assert Path("log.txt").read_text() == "012end"


def test_a_function_that_forks_gives_one_score(files):
    files(
        {
            "r.py": "import os, time\ndef f(prompt, response):\n    child = os.fork()\n"
            "    if child: os.waitpid(child, 0)\n    return int(response) + (child == 0) * 100\n"
        }
    )
    assert scores("r.py:f", num=3) == {"r.py:f": [0, 1, 2]}


def test_a_function_that_writes_into_the_result_pipe_fails(files):
    files(
        {"r.py": "import os, sys\ndef f(prompt, response):\n    os.write(int(sys.argv[1]), b'x' * 100)\n    return 1\n"}
    )
    with ScorerPool(["r.py:f"], timeout_s=60, num_workers=1, on_error="zero") as pool:
        result = pool.score([make_rollout()])
    assert result.num_failed == 1 and result.scores == [0]
