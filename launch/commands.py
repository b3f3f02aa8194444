"""What each command does and how it is called, for the help texts of `hybrid-rl` and of the scripts in this folder."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command as its help shows it."""

    title: str
    """One sentence, which also stands in the list of all commands."""
    examples: Mapping[str, str]
    """Arguments -> what they do."""


COMMANDS: Mapping[str, Command] = {
    "run": Command(
        title="Train on this node: one process per visible GPU, or one process on a CPU.",
        examples={
            "": "the embedded demo",
            "--config my.yaml": "a run of your own; started again, it continues from its latest checkpoint",
            "--config grpo": "a configuration of this package, see hybrid-rl configs",
            "--config my.yaml --update.actor.lr 1e-6": "settings on the command line count before a file's",
        },
    ),
    "check": Command(
        title="Report all mistakes that show before a model loads.",
        examples={
            "--config my.yaml": "for a run on this machine",
            "--config my.yaml --gpu h100 --gpus 8": "for a run on another machine",
        },
    ),
    "plan": Command(
        title="Show memory and time of a run on the GPUs of any machine; needs no GPU.",
        examples={
            "--config my.yaml": "on one GPU of this machine",
            "--config my.yaml --gpu h100 --gpus 8": "on eight GPUs of a node",
            "--config my.yaml --gpu-memory 48GB": "on a card that is not known: memory, and no seconds",
        },
    ),
    "data": Command(
        title="Show prompts, their lengths, and what the reward functions make of right and of empty answers.",
        examples={"--config my.yaml": "the data of a run"},
    ),
    "rollouts": Command(
        title="Show responses of a run, conversations as turns with roles, token counts and rewards.",
        examples={
            "runs/my-run": "the first responses of the last step",
            "runs/my-run --step 20 --order lowest": "those with the lowest rewards",
        },
    ),
    "ray": Command(
        title="Train on a Ray cluster: one worker per GPU, on one node or many.",
        examples={
            "--address auto --config my.yaml": "every GPU of a running cluster",
            "--address local --cpu --num_workers 2": "two ranks in a new cluster on this node",
            "--config my.yaml --max_failures 3": "restarts after the failure of a node",
            "plan --config my.yaml --address auto": "memory and time of a run on a running cluster",
        },
    ),
    "translate": Command(
        title="Print the settings that correspond to a command line of OpenRLHF, ColossalChat, verl or TRL.",
        examples={
            'openrlhf "$(cat train.sh)" > my.yaml': "a whole script, with a comment for every difference",
            "trl --model_name_or_path my-model ...": "the arguments of a program",
        },
    ),
    "configs": Command(
        title="List the configurations of this package, or print one of them.",
        examples={"": "names, each with its first line", "grpo > my.yaml": "a copy to change"},
    ),
}
"""Name of a command -> its help, in the order of the list."""


def description(name: str, program: str) -> str:
    """Return the description of a command: its sentence, and examples of its use.

    Args:
        name: of the command.
        program: words that call the command.
    """
    command = COMMANDS[name]
    calls = {f"{program} {arguments}".rstrip(): meaning for arguments, meaning in command.examples.items()}
    width = max(map(len, calls))
    return "\n".join([command.title, "", *(f"{call:{width}}  {meaning}" for call, meaning in calls.items())])
