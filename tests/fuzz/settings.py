"""Fuzz subjects: settings files and command lines, valid ones and ones that are wrong in one place."""

import contextlib
import io
import json
import math
import random
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from hybrid_rl.config import Config, as_dict
from hybrid_rl.validate import validate
from launch.settings import exit_on_config_error, make_parser, read_settings
from tests.fuzz.cases import Refusal, check_refused, check_sentence

Values = dict[str, Any]
"""Dotted name of a setting -> its value."""

ALWAYS: Values = {"models.actor": "a", "prompts.path": "p.jsonl", "reward.functions": ["exact_match"]}
OPTIONS: dict[str, list[Any]] = {
    "run.name": ["x", "my run", "42", "1e3", "no", "null", "2024-01-01", "a: b", "#1", "\u00e9\u4f60", "007"],
    "run.seed": [0, 7, 2**31],
    "run.resume": ["never", "auto", "must"],
    "run.eval_every_steps": [0, 5],
    "run.profile_steps": [None, [1, 2], [3, 3]],
    "run.stop_at_accuracy": [None, 1, 0.5],
    "models.critic": [None, "c"],
    "models.lora.rank": [0, 8],
    "models.lora.target_modules": [None, ["q_proj"], ["q_proj", "v_proj"]],
    "models.dtype": ["auto", "float32", "bfloat16"],
    "models.fused_layers": ["auto", "liger", "off"],
    "models.gradient_checkpointing": [True, False],
    "prompts.answer_column": [None, "solution", "on"],
    "prompts.system_message": [None, "Be brief.\nPlease: do.", "yes", ""],
    "prompts.shuffle": [True, False],
    "prompts.task_options": [{}, {"min_terms": 2, "off": [1, None, "x"]}],
    "rollout.temperature": [1.0, 0.7, 1],
    "rollout.stop_token_ids": [[], [1, 2]],
    "rollout.stop_strings": [[], ["</answer>", "no"], ["1"]],
    "rollout.kv_cache_memory_bytes": [None, 1 << 20, 1 << 34],
    "rollout.gpu_memory_utilization": [0.5, 1.0, 0.01],
    "rollout.prefix_caching": [True, False],
    "reward.weights": [None, [0.5], [-1]],
    "reward.on_error": ["raise", "zero"],
    "reward.clip": [None, 5.0, 1],
    "reward.normalize": [True, False],
    "advantage.gamma": [1.0, 0.99, 1, 0],
    "advantage.gae_lambda": [0.95, 1, 0.0],
    "advantage.kl_coef": [0.0, 0.02, 1e-3],
    "advantage.kl_in": ["reward", "loss"],
    "advantage.kl_estimator": ["k1", "k2", "k3"],
    "advantage.whiten": [True, False],
    "update.policy_loss": ["clip", "gspo", "cispo", "pg"],
    "update.clip_high": [0.2, 0.28, 1],
    "update.value_clip": [None, 0.5],
    "update.entropy_coef": [0.0, 1e-4],
    "update.zero_stage": [1, 2, 3],
    "update.actor.lr": [1e-6, 3e-4, 1],
    "update.actor.betas": [[0.9, 0.95], [0, 0.999]],
    "update.critic.warmup_steps": [0, 10],
    "update.critic.schedule": ["constant", "linear", "cosine"],
    "memory.swap": ["auto", "vmm", "off"],
    "sync.mode": ["auto", "copy", "alias"],
    "checkpoint.every_steps": [1, 50],
    "checkpoint.async_save": [True, False],
}
"""Setting -> values that are right together with all others of the table."""


def random_values(rng: random.Random) -> Values:
    """Return settings that are valid by construction."""
    chosen = rng.sample(sorted(OPTIONS), rng.randint(0, 14))
    values = ALWAYS | {name: rng.choice(OPTIONS[name]) for name in chosen}
    prompts, group = rng.choice([4, 6, 32]), rng.choice([1, 2, 8])
    estimator = rng.choice(["gae", "reinforce_pp", "remax", *(["grpo", "rloo"] if group > 1 else [])])
    prompt_tokens, response_tokens = rng.randint(1, 600), rng.randint(1, 600)
    return values | {
        "rollout.rollout_batch_size": prompts,
        "rollout.group_size": group,
        "update.mini_batch_size": prompts * group // rng.choice([1, 2]),
        "advantage.estimator": estimator,
        "prompts.max_prompt_tokens": prompt_tokens,
        "rollout.max_response_tokens": response_tokens,
        "update.micro_batch_tokens": prompt_tokens + response_tokens + rng.randint(0, 5000),
    }


def as_tree(values: Values) -> dict[str, Any]:
    """Return settings as nested sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def leaves(tree: Any, types_of: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> type annotation of every setting."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(types_of)
    for field in fields(types_of):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        found |= leaves(tree, hint, f"{name}.") if is_dataclass(hint) else {name: hint}
    return found


HINTS = leaves({})


def parse(arguments: list[str]) -> Config | Refusal:
    """Return the settings that a command line gives, or the sentences with which the launcher refuses it."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()), exit_on_config_error():
            config, _ = read_settings(make_parser("colocated.py", None), arguments)
            return validate(config)
    except SystemExit as stopped:
        assert stopped.code == 2, f"exit code {stopped.code}: {errors.getvalue()}"
    lines = [line for line in errors.getvalue().splitlines() if not line.startswith("warning: ")]
    assert lines and all(line.startswith("error: ") for line in lines), f"not sentences alone: {errors.getvalue()!r}"
    return Refusal(messages=tuple(line.removeprefix("error: ") for line in lines))


def setting(config: Config, name: str) -> Any:
    """Return the value of a dotted name, tuples as lists."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


def check_valid_settings(rng: random.Random, folder: Path) -> None:
    """Valid settings are taken as they are, from a file and a command line, and survive config.yaml."""
    values = random_values(rng)
    on_line = {name for name in values if rng.random() < 0.2 and not isinstance(values[name], dict | list | None)}
    if values.get("run.name", "") in ("no", "null", "1e3", "42", "007", "2024-01-01"):
        on_line.discard("run.name")
    in_file = as_tree({name: value for name, value in values.items() if name not in on_line})
    text = yaml.safe_dump(
        in_file, sort_keys=rng.random() < 0.5, default_flow_style=rng.random() < 0.3, allow_unicode=True
    )
    if rng.random() < 0.2:
        text = json.dumps(in_file)
    path = folder / rng.choice(["a.yaml", "b.yml", "c d.yaml", "conf"])
    path.write_text(rng.choice(["", "", "\ufeff", "# settings\n", "---\n"]) + text, encoding="utf-8")
    words = ["--config", str(path)]
    for name in sorted(on_line):
        value = values[name]
        word = str(value).lower() if isinstance(value, bool) else str(value)
        words += rng.choice([[f"--{name}", word], [f"--{name}={word}"]])
    found = parse(words)
    assert isinstance(found, Config), f"refuses {words[2:]} and {text}: {found}"
    for name, value in values.items():
        assert setting(found, name) == value, f"{name} is {setting(found, name)!r} instead of {value!r}"
    defaults = Config()
    for name in HINTS.keys() - values.keys():
        assert setting(found, name) == setting(defaults, name), f"{name} is not its default"
    again = folder / "config.yaml"
    again.write_text(yaml.safe_dump(as_dict(found), sort_keys=False))
    assert parse(["--config", str(again)]) == found, "config.yaml gives other settings"


WRONG_OF_TYPE: dict[Any, list[Any]] = {
    int: ["x", 1.5, True, [1], {}, "1 2", "inf", "0x", "1:30", ""],
    float: ["x", True, [1], {}, "1,5", "one", ".nan", ".inf", "1:30.5", ""],
    bool: ["x", 2, [True], {}, "maybe", 1.0],
    str: [5, 1.5, True, ["a"], {"a": 1}],
    dict: ["x", 5, [1]],
    list: ["x y", 5, {"a": 1}, True],
    tuple: ["x", 5, [1], [1, 2, 3], [], {"a": 1}],
}


def plain_type(hint: Any) -> tuple[Any, bool]:
    """Return the class of a setting's values, and whether it takes null."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return plain_type(inner[0])[0], type(None) in typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return typing.Literal, False
    return typing.get_origin(hint) or hint, False


def wrong_type(rng: random.Random) -> tuple[str, Any]:
    """Return a setting and a value of another type, or null where it takes none."""
    name = rng.choice(sorted(HINTS))
    kind, takes_null = plain_type(HINTS[name])
    choices = ["neither", 5.5, True, [], {"a": 1}] if kind is typing.Literal else WRONG_OF_TYPE[kind]
    if kind is str:  # numbers and words of YAML may be meant as text
        others = typing.get_args(HINTS[name])
        choices = [value for value in (["a"], {"a": 1}) if type(value) not in others]
    return name, rng.choice([*choices, *([] if takes_null else [None] * 3)])


OUT_OF_RANGE: dict[str, list[Any]] = {
    "run.num_steps": [0, -1],
    "run.seed": [-1],
    "run.stop_at_accuracy": [0, 1.5, -0.1],
    "run.profile_steps": [[0, 1], [3, 2]],
    "models.reference_mixup_alpha": [0, 1.1],
    "models.ema_decay": [1, 0, -0.5],
    "models.lora.rank": [-1],
    "prompts.max_prompt_tokens": [0, -5],
    "prompts.max_eval_samples": [-1, 0],
    "rollout.temperature": [0, -1, math.inf],
    "rollout.stop_token_ids": [[-1]],
    "rollout.stop_strings": [[""]],
    "rollout.dynamic_filtering_reward_range": [[1, 0], [0.5, 0.5]],
    "rollout.kv_cache_memory_bytes": [-5, 0],
    "rollout.gpu_memory_utilization": [5, 0, -0.1],
    "rollout.max_num_seqs": [0],
    "reward.weights": [[1, 1], []],
    "reward.timeout_s": [0, -1],
    "reward.num_workers": [0, -2],
    "reward.remote_retries": [-1],
    "reward.clip": [0, -1],
    "advantage.gamma": [1.1, -0.1],
    "advantage.gae_lambda": [2, -1],
    "advantage.kl_coef": [-0.1],
    "update.mini_batch_size": [0, -4],
    "update.micro_batch_tokens": [0, -1],
    "update.clip_low": [-0.1, 1.5],
    "update.clip_high": [-0.1],
    "update.correction_low": [1.5, -1],
    "update.correction_high": [0.5],
    "update.zero_stage": [4, -1],
    "update.actor.lr": [-1e-6],
    "update.actor.betas": [[1.0, 0.9], [-0.1, 0.5], [0.9, 2]],
    "update.actor.eps": [-1],
    "update.critic.max_grad_norm": [-1],
    "update.critic.warmup_steps": [-1],
    "sync.bucket_bytes": [0, -1],
    "sync.num_verified": [-1],
    "checkpoint.keep_last": [0, -1],
    "checkpoint.every_steps": [-1],
}


def check_wrong_value(rng: random.Random, folder: Path) -> None:
    """A value of a wrong type or out of range is refused with code 2, in sentences of which one names the setting."""
    values = random_values(rng)
    if rng.random() < 0.5:
        name, value = wrong_type(rng)
    else:
        name = rng.choice(sorted(OUT_OF_RANGE))
        value = rng.choice(OUT_OF_RANGE[name])
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(as_tree({**values, name: value})))
    words = ["--config", str(path)]
    if rng.random() < 0.2 and plain_type(HINTS[name])[0] is not str:  # which takes any word
        path.write_text(yaml.safe_dump(as_tree({k: v for k, v in values.items() if k != name})))
        words.append(f"--{name}={'null' if value is None else json.dumps(value)}")
    found = parse(words)
    check_refused(found, f"{name} = {value!r}")
    check_messages(found)
    last = name.rpartition(".")[2]
    assert any(name in message or last in message for message in found.messages), f"does not name {name}: {found}"


def check_messages(found: Refusal) -> None:
    """Check that every message is a sentence."""
    for message in found.messages:
        check_sentence(message)


def check_traps(rng: random.Random, folder: Path) -> None:
    """A word of YAML means what the setting takes: `off` is a choice, and a number is read as it stands, or refused."""
    text_of = {
        "memory.swap": ["off", "OFF", "Off", "auto", '"off"'],
        "models.fused_layers": ["off", "auto"],
        "run.name": ["on", "yes", "0o17", "1e3", "12:30", "1_000", "2024-01-01", "~x", "off", "y"],
        "rollout.group_size": ["010", "1_0", "0x10", "1:30", "1e1", "2.0", "+2", "0b10", "--5"],
        "update.actor.lr": ["1e-6", "1E-06", "1.e-6", ".5e-3", "1e-6 ", "1:30", "0.000_1", "5e-7", "1_0e-9"],
        "rollout.prefix_caching": ["on", "off", "yes", "no", "True", "FALSE", "0", "1", "y"],
    }
    name = rng.choice(list(text_of))
    word = rng.choice(text_of[name])
    values = {k: v for k, v in random_values(rng).items() if k not in (name, "update.mini_batch_size")}
    values |= {"rollout.rollout_batch_size": 4, "update.mini_batch_size": 4, "advantage.estimator": "reinforce_pp"}
    if name == "memory.swap":
        values["update.zero_stage"] = 1
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(as_tree({**values, name: "PLACE"})).replace("PLACE", word))
    words = ["--config", str(path)]
    if rng.random() < 0.3:
        path.write_text(yaml.safe_dump(as_tree(values)))
        words.append(f"--{name}={word}")
    found = parse(words)
    meanings = _meanings(name, word)
    if isinstance(found, Refusal):
        check_messages(found)
        assert not (name in ("memory.swap", "models.fused_layers") and word in ("off", "auto", '"off"')), f"{found}"
        assert word not in ("1e-6", "5e-7", "1E-06"), f"refuses {word}: {found}"
        return
    assert setting(found, name) in meanings, f"{name}: {word} becomes {setting(found, name)!r}"


def _meanings(name: str, word: str) -> list[Any]:
    """Return what a word may mean for a setting; it may be refused instead."""
    if name in ("memory.swap", "models.fused_layers"):
        return [word.strip('"').lower()]
    if name == "run.name":
        return [word]
    if name == "rollout.prefix_caching":
        return [word.lower() in ("on", "yes", "true", "1", "y")]
    found: list[Any] = []
    for read in (int, float) if name == "rollout.group_size" else (float,):
        with contextlib.suppress(ValueError):
            found.append(read(word))
    return [*found, *([16] if word == "0x10" else []), *([2] if word == "0b10" else [])]


def check_structure(rng: random.Random, folder: Path) -> None:
    """Keys that are unknown or given twice, and files that are no settings, are refused in a sentence."""
    values = random_values(rng)
    text = yaml.safe_dump(as_tree(values))
    name = rng.choice(sorted(values))
    section, _, key = name.rpartition(".")
    changes: dict[str, Callable[[], bytes]] = {
        "unknown key": lambda: yaml.safe_dump(as_tree({**values, f"{section}.{key}s": 1})).encode(),
        "unknown section": lambda: (text + f"{rng.choice(['rewards', 'Run', 'trainer'])}:\n  a: 1\n").encode(),
        "second section": lambda: (text + f"{section.split('.')[0]}:\n  {key}: 1\n").encode(),
        "second key": lambda: (
            text.replace("run:\n", "run:\n  num_steps: 5\n  num_steps: 6\n").encode()
            if "run:\n" in text
            else (text + "run:\n  num_steps: 5\n  num_steps: 6\n").encode()
        ),
        "section is text": lambda: (yaml.safe_dump({**as_tree(values), "memory": "off"})).encode(),
        "section is a list": lambda: (yaml.safe_dump({**as_tree(values), "memory": [1]})).encode(),
        "list": lambda: yaml.safe_dump([as_tree(values)]).encode(),
        "number": lambda: b"5\n",
        "tab": lambda: b"run:\n\tnum_steps: 5\n",
        "cut": lambda: text.encode()[: rng.randrange(4, 20)] + b": [",
        "binary": lambda: rng.randbytes(rng.randint(1, 80)) + b"\xff",
        "utf-16": lambda: text.encode("utf-16") + b"\x00",
        "latin-1": lambda: (text + "# \u00e9\n").replace("#", "run: {name: \u00e9}  #").encode("latin-1"),
        "nul": lambda: text.encode() + b"\x00",
        "alias": lambda: b"run: *missing\n",
        "tag": lambda: b"run: !!python/object/apply:os.system ['true']\n",
        "two documents": lambda: (text + "---\n" + text).encode(),
        "number key": lambda: (text + "5: 6\n").encode(),
        "null section": lambda: (yaml.safe_dump({**as_tree(values), "memory": None})).encode(),
        "null key": lambda: (text + "null: 1\n").encode(),
    }
    change = rng.choice(sorted(changes))
    path = folder / "settings.yaml"
    path.write_bytes(changes[change]())
    found = parse(["--config", str(path)])
    if change == "utf-16" and isinstance(found, Config):  # YAML has UTF-16 too, if it is read as such
        return
    if change == "null section" and isinstance(found, Config):
        assert setting(found, "memory.swap") == Config().memory.swap, "an empty section changes a setting"
        return
    check_refused(found, f"{change}: {path.read_bytes()[:300]!r}")
    check_messages(found)
    if change in ("unknown key", "unknown section", "second section", "second key"):
        assert any(key in m or "settings.yaml" in m or "section" in m or "'" in m for m in found.messages), f"{found}"


def check_command_line(rng: random.Random, folder: Path) -> None:
    """A command line with a wrong word is refused in sentences."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(as_tree(ALWAYS)))
    base = ["--config", str(path)]
    words = rng.choice(
        [
            ["--config", str(folder / "missing.yaml")],
            ["--config", str(folder)],
            ["--config"],
            [*base, "--run.num_step", "5"],
            [*base, "--run.num_steps"],
            [*base, "--run.num_steps", "five"],
            [*base, "--run.num_steps", ""],
            [*base, "extra"],
            [*base, "--run", "5"],
            [*base, "--run", "{num_steps: x}"],
            [*base, "--run.num_steps=1=2"],
            [*base, "--update.actor", "[1]"],
            [*base, "--rollout.stop_strings", "[a"],
            [*base, "--run.num_steps", "5", "--run.num_steps", "x"],
            [*base, "-x"],
            [*base, "--prompts.task_options", "{a"],
            [*base, "--run.name", "\udcff"],
            [*base, "--update.actor.lr", "nan"],
        ]
    )
    found = parse(words)
    check_refused(found, str(words))
    check_messages(found)
