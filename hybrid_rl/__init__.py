"""Colocated RLHF/RLVR training: DeepSpeed trains and vLLM generates on the same GPUs, in turns."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def train(
    config: Any,
    *,
    reward_functions: Sequence[Callable[..., object]] = (),
    environment: Callable[..., object] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    dataset: Any = None,
    eval_dataset: Any = None,
) -> dict[str, float]:
    """Train with functions, classes and rows of this program, and return the last evaluation.

    Under torchrun every process calls it with equal arguments, and they train together, one GPU each; a program that is
    started with plain python is one rank. The functions run in worker processes, to which cloudpickle brings them.

    Args:
        config: hybrid_rl.config.Config, a dictionary of sections or of dotted names, or the path of a YAML file.
        reward_functions: functions in the signatures that reward.functions takes, added to those of the settings. A
            weight in reward.weights belongs to each; gates name them `given:` and the function's name.
        environment: class with `reset` and `step` in the place of environment.name, whose keyword arguments are
            environment.arguments; or an agent, a function that takes an OpenAI client or a base_url.
        tools: functions that the model may call, added to environment.tools.
        dataset: list of dictionaries or datasets.Dataset in the place of prompts.path. It is written to a file next to
            the run's folder, from which a run continues.
        eval_dataset: the same in the place of prompts.eval_path.
    Returns:
        evaluation: metric -> value, empty without held-out prompts.
    Raises:
        hybrid_rl.config.ConfigError: a setting, a function or a row cannot work; one sentence for each.
        hybrid_rl.errors.RunError: the run cannot go on.
    """
    train_from_python = import_module("hybrid_rl.launch.from_python").train
    found: dict[str, float] = train_from_python(
        config,
        reward_functions=reward_functions,
        environment=environment,
        tools=tools,
        dataset=dataset,
        eval_dataset=eval_dataset,
    )
    return found
