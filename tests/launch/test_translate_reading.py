"""How the words of scripts, overrides and YAML files are read, and what ends a translation with one sentence."""

import re
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import ConfigError
from launch.translate import trl, verl
from launch.translate.command import settings_of, translate
from launch.translate.program import GROUP, Program
from launch.translate.reading import read_arguments
from launch.translate.shell import commands, up_to_operator
from launch.translate.systems import SYSTEMS

PROGRAMS = [program for programs in SYSTEMS.values() for program in programs]
ODD_VALUES = ("nonsense", "0", "-1", "nan", "null")


def words_of(script: str) -> list[str]:
    """Return the words of the last command of a script."""
    return up_to_operator(commands(script)[-1])


@pytest.mark.parametrize(
    "script, words",
    [
        ("A=3\nB=$((A * 2 + 1))\nrun $B $((B / 2)) $(( (A + B) * 1024 ))", ["7", "3", "10240"]),
        ("run $((UNKNOWN * 2))", ["$((UNKNOWN * 2))"]),
        ('M=${MODEL:-"org/model"}\nN=${M:-other}\nrun $M ${N}', ["org/model", "org/model"]),
        ("run $HOME/data $PWD/x", ["~/data", "./x"]),
        ("p=$HOME/a.parquet\nfiles=\"['$p', '$p']\"\nrun \"$files\"", ["['~/a.parquet', '~/a.parquet']"]),
        ('run \'["console","wandb"]\' "a b" a\\ b', ['["console","wandb"]', "a b", "a b"]),
        ('A=(\n  x="1 2"  # a comment\n  # y\n  z\n)\nrun "${A[@]}" ${A[0]}', ["x=1 2", "z", "${A[0]}"]),
        ("A=(n=$((2 * 3)))\nrun ${A[@]} $@", ["n=6"]),
        ('run a "$@" 2>&1 | tee log', ["a"]),
        ('bash -c "cd /x && run --a \'1\' --b \\"2\\"" &>> log', ["--a", "1", "--b", "2"]),
        ("X=1 Y=2\nrun $X$Y", ["12"]),
        ("OUT=$(date)\nrun out-${OUT}", ["out-${OUT}"]),
        ("run a \\\n  b # c", ["a", "b"]),
    ],
)
def test_a_script_is_read_as_a_shell_would(script: str, words: list[str]) -> None:
    assert words_of(script) == ["run", *words]


@pytest.mark.parametrize("quotation", ["'a b", '"a b', '"a \\" b'])
def test_an_open_quotation_is_an_error(quotation: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"no closing quotation: run {quotation}")):
        commands(f"echo x\nrun {quotation}")


def test_control_characters_of_a_script_are_escaped_in_the_comments() -> None:
    text = translate(SYSTEMS["--from-openrlhf"], ["--pretrain $X\x1b[2J\x85run:"]).text
    assert "# - --pretrain $X\\u001b[2J\\u0085run:\n" in text
    assert text.isascii() and "\x1b" not in text


def read(program: Program, *words: str) -> dict[str, Any]:
    """Return the values of the arguments that are given."""
    command = read_arguments(program, words)
    return {name: command[name] for name in command.given}


def test_overrides_are_read_as_hydra_reads_them() -> None:
    files, loggers = "data.train_files", "trainer.logger"
    assert read(verl.PROGRAM, f"{files}=a.parquet") == {files: ["a.parquet"]}
    assert read(verl.PROGRAM, f"++{files}=['a b', c]", f"+{loggers}=[\"console\",'wandb']") == {
        files: ["a b", "c"],
        loggers: ["console", "wandb"],
    }
    optimizer = "actor_rollout_ref.actor.optim"
    assert read(verl.PROGRAM, f"{optimizer}.betas=[0.9,0.95]", f"{optimizer}.lr=1e-6") == {
        f"{optimizer}.betas": [0.9, 0.95],
        f"{optimizer}.lr": 1e-6,
    }
    assert read(verl.PROGRAM, "data.shuffle=False", "data.seed=null") == {"data.shuffle": False, "data.seed": None}
    assert read(verl.PROGRAM, "--config-name=ppo_trainer", "--config-path", "x") == {
        "--config-name": "ppo_trainer",
        "--config-path": ["x"],
    }


def test_overrides_of_a_group_are_all_named() -> None:
    options = "actor_rollout_ref.rollout.engine_kwargs"
    text = translate(SYSTEMS["--from-verl"], [f"{options}.vllm.a=1", f"+{options}.vllm.b=2"]).text
    assert f"{options}.vllm.a, {options}.vllm.b" in " ".join(text.split()).replace("# ", "")


def test_switches_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    assert read(trl.PROGRAM, "--use-vllm", "--bf16", "false", "--no_shuffle_dataset") == {
        "use_vllm": True,
        "bf16": False,
        "shuffle_dataset": False,
    }
    assert read(trl.PROGRAM, "--lora_target_modules", "q_proj,", "v_proj", "--max_steps=-1") == {
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_steps": -1,
    }
    path = tmp_path / "grpo.yaml"
    path.write_text("env:\n  X: 1\nbeta: 0.1\nlearning_rate: 1e-6\nreward_funcs: [accuracy_reward]\n")
    given = {"beta": 0.1, "learning_rate": 1e-6, "reward_funcs": ["accuracy_reward"]}
    assert read(trl.PROGRAM, "--config", str(path)) == given
    assert read(trl.PROGRAM, "--beta", "0.2", "--config", str(path)) == {**given, "beta": 0.2}
    assert read(trl.PROGRAM, path.read_text()) == given
    with_colon = """trl grpo --chat_template_kwargs '{"enable_thinking": false}' --beta 0.1"""
    assert "kl_coef: 0.1" in translate(SYSTEMS["--from-trl"], [with_colon]).text
    in_command = translate(SYSTEMS["--from-trl"], [f"accelerate launch --num_processes 2 trl grpo --config {path}"])
    assert "--gpus 2\n" in in_command.text


@pytest.mark.parametrize(
    "option, text, sentence",
    [
        ("--from-openrlhf", "--algo.advantage.is_correction_type x", "has no counterpart here, only tis, icepop"),
        ("--from-openrlhf", "--algo.advantage.is_correction_gating tv", "is_correction_gating tv: has no counterpart"),
        ("--from-openrlhf", "--algo.advantage.estimator flash_reinforce", "flash_reinforce: has no counterpart here"),
        ("--from-openrlhf", "--actor.optim sgd", "--actor.optim sgd: has no counterpart here, only adam, muon"),
        ("--from-openrlhf", "--ds.attn_implementation x", "only flash_attention_2,"),
        ("--from-openrlhf", "--rollout.batch_size 0", "--rollout.batch_size 0: must be a whole number above 0"),
        (
            "--from-openrlhf",
            "--algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip",
            "OpenRLHF only masks whole sequences",
        ),
        ("--from-coati", "python train_ppo.py --plugin ddp", "--plugin ddp: has no counterpart here, only gemini"),
        ("--from-verl", "algorithm.adv_estimators=grpo", "(did you mean algorithm.adv_estimator?)"),
        ("--from-verl", "data.train_batch_size=$N", "the script does not set this variable; replace it by its value"),
        ("--from-verl", "data.shuffle=null", "data.shuffle null: must be true or false"),
        ("--from-verl", "actor_rollout_ref.rollout.multi_turn.enable=True", "list them in environment.tools"),
        ("--from-verl", "algorithm.rollout_correction.rollout_rs=token_k1 "
         "algorithm.rollout_correction.rollout_rs_threshold=x", "must be a number, or two as in 0.5_2.0"),
        ("--from-trl", "--loss_type sapo", "--loss_type sapo: has no counterpart here, only grpo, dapo"),
        ("--from-trl", "--bf16 maybe", "--bf16 maybe: must be true or false"),
        ("--from-trl", "--reward_funcs mine", "--reward_funcs mine: has no counterpart here"),
        ("--from-trl", "--reward_funcs a.f --reward_weights 1 2", "--reward_weights has 2 values for 1 rewards"),
        ("--from-trl", "--num_generations 3", "--num_generations 3: must divide the 8 responses of a generation"),
        ("--from-trl", "--config no.yaml", "--config no.yaml: cannot be read"),
        ("--from-trl", "datasets:\n  - path: a", "a mixture is not translated"),
    ],
)  # fmt: skip
def test_what_has_no_translation_ends_with_one_sentence(option: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as error:
        translate(SYSTEMS[option], [text])
    assert len(error.value.messages) == 1 and "\n" not in error.value.messages[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.names[0])
def test_no_value_of_an_argument_ends_in_a_trace(program: Program) -> None:
    for argument in program.arguments:
        name = f"{program.dashes}{argument.names[0].replace(GROUP, '.x')}"
        for value in ODD_VALUES if argument.effect != "fixed" else ():
            words = [f"{name}={value}"] if program.syntax == "overrides" else [name, value]
            try:
                settings_of(program, read_arguments(program, words))
            except ConfigError as error:
                assert len(error.messages) == 1 and "\n" not in error.messages[0], (words, error)
