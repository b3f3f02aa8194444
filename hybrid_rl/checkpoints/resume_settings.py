"""Compares settings, models and reward files of a run that continues with its checkpoint. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_rl.checkpoints.resume_rules import BY_CONTENT, EVALUATION, MAY_CHANGE, REFUSED, RULES, Rule
from hybrid_rl.config import BY_SOURCE, Config, ConfigError, as_dict
from hybrid_rl.config_data import paths_in
from hybrid_rl.rewards.loading import reward_file_hashes

REMEDY = "or start a new run with another run.name, or with run.resume = never, which moves this one aside"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """How a run that continues differs from its checkpoint."""

    refused: tuple[str, ...]
    """One sentence for each difference with which the run cannot continue."""
    warned: tuple[str, ...]
    """One clause for each difference that is worth a warning."""
    is_other_evaluation: bool = False
    """Whether accuracies before and after do not compare."""

    def __add__(self, other: "Changes") -> "Changes":
        return Changes(
            refused=self.refused + other.refused,
            warned=self.warned + other.warned,
            is_other_evaluation=self.is_other_evaluation or other.is_other_evaluation,
        )


def plain_settings(config: Config) -> dict[str, Any]:
    """Return the settings as JSON values, as a checkpoint holds them."""
    return json.loads(json.dumps(as_dict(config)))


def compare(saved: Mapping[str, Any], config: Config) -> Changes:
    """Compare saved settings with the present ones, by the rules of RULES; a setting that is not saved has its default.

    Args:
        saved: what plain_settings returned.
        config: settings of the run that continues.
    """
    old = {**flatten(plain_settings(Config())), **flatten(saved)}
    new = flatten(plain_settings(config))
    refused, warned = [], []
    changed = {name for name in RULES if name in new and old.get(name) != new[name]}
    for name in sorted(changed):
        rule, values = RULES[name], (old.get(name), new[name])
        if rule.needs is not None and not new[rule.needs]:
            continue
        if rule.kind == REFUSED and _is_refused(rule, *values):
            refused.append(
                f"{name} = {_yaml(new[name])}, but the checkpoint was written with {_yaml(old.get(name))}, and "
                f"{rule.reason}: set {name} back, {REMEDY}"
            )
        elif rule.kind not in (MAY_CHANGE, BY_CONTENT):
            warned.append(f"{name} from {_yaml(old.get(name))} to {_yaml(new[name])} ({rule.reason})")
    return Changes(
        refused=tuple(refused),
        warned=tuple(warned),
        is_other_evaluation=not changed.isdisjoint(EVALUATION)
        or (new["run.eval_function"] is None and bool(changed & {"reward.functions", "reward.weights"}))
        or (config.eval_function == BY_SOURCE and "reward.by_source" in changed),
    )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of nested settings; a value that is a mapping itself, such as task_options, stays."""
    return dict(_leaves(settings, prefix))


def _leaves(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and dotted not in RULES:
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def _is_refused(rule: Rule, old: Any, new: Any) -> bool:
    return rule.trait is None or rule.trait(old) != rule.trait(new)


def _yaml(value: Any) -> str:
    """Return a value as YAML has it on one line."""
    return value if isinstance(value, str) and value else json.dumps(value)


def compare_models(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Changes:
    """Compare the content of the models; a critic or reference that only one has is a matter of the settings.

    Args:
        saved, present: role (actor, critic, reference, reward) -> `path` and `content`, as model_contents returns them.
    """
    refused = [
        f"models.{role} = {present[role]['path']} is another model than the run's, {saved[role]['path']} when it "
        f"started (hash {_short(present[role])}, was {_short(saved[role])}): give the run's model, {REMEDY}"
        for role in sorted(saved.keys() & present.keys())
        if saved[role]["content"] != present[role]["content"]
    ]
    paths = [contents.get("reward", {}).get("path") for contents in (saved, present)]
    warned = [f"models.reward from {_yaml(paths[0])} to {_yaml(paths[1])} (rewards have another meaning)"]
    is_changed = bool(saved) and (paths[0] is None) != (paths[1] is None)
    return Changes(refused=tuple(refused), warned=tuple(warned if is_changed else ()))


def reward_files(config: Config) -> dict[str, str]:
    """Return name -> SHA-256 of its file for each reward function that is not built in.

    A name without a file is left out: the load of the reward functions refuses it.
    """
    found = dict[str, str]()
    for name in config.rule_functions:
        try:
            found |= reward_file_hashes([name])
        except ConfigError:
            continue
    return found


def compare_reward_files(saved: Mapping[str, str], present: Mapping[str, str], config: Config) -> Changes:
    """Compare the content of reward files; a function that only one has is a matter of the settings.

    Args:
        saved, present: what reward_files returned.
        config: settings of the run that continues.
    """
    of_sources = paths_in(config.reward.by_source) if config.eval_function == BY_SOURCE else ()
    judges = {config.eval_function, *of_sources}
    edited = [name for name in sorted(saved.keys() & present.keys()) if saved[name] != present[name]]
    return Changes(
        refused=(),
        warned=tuple(f"the file of {name} was edited (rewards may have another meaning)" for name in edited),
        is_other_evaluation=not judges.isdisjoint(edited),
    )


def _short(model: Mapping[str, Any]) -> str:
    return model["content"].removeprefix("commit ")[:12]
