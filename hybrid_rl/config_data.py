"""The settings of data: where prompts come from, and how a row becomes token ids."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Format = Literal[
    "auto",
    "plain",
    "verl",
    "preference",
    "trl",
    "open_instruct",
    "gsm8k",
    "math",
    "openrlhf",
    "openrlhf_chat",
    "sharegpt",
]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One data set of `prompts.path`, `prompts.eval_path` or `ptx.path`. What is None is as for all data sets."""

    path: str
    """File, folder, URL, name on the hub or `reasoning_gym:<task>`."""
    weight: float | None = None
    """Share of the mixture, relative to the other weights; None in all data sets joins them."""
    split: str | None = None
    """Split of a folder or of a data set on the hub."""
    max_samples: int | None = None
    """Maximum number of rows, taken from the start."""
    format: Format | None = None
    """Format of the rows; see `prompts.format`."""
    prompt_column: str | None = None
    """Column of the prompt."""
    answer_column: str | None = None
    """Column of the answer."""
    column: str | None = None
    """Column of the text; of `ptx.path` alone."""
    data_source: str | None = None
    """Name of the data set that `reward.by_source` chooses rule functions by; None takes the column of the row."""
    task_options: dict | None = None
    """Arguments of the reasoning_gym task."""


def source_of(value: str | dict[str, Any]) -> DataSource:
    """Return the data set that an item of a setting names."""
    return DataSource(path=value) if isinstance(value, str) else DataSource(**value)


def sources_of(value: str | list[Any] | None) -> list[DataSource]:
    """Return the data sets of a setting that names one or a list of them; none for null."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [source_of(item) for item in items]


def named_sets(value: str | dict[str, Any] | None) -> dict[str, str | dict[str, Any]]:
    """Return name -> data set of `prompts.eval_path`; the name of a single data set is empty."""
    if value is None:
        return {}
    return value if isinstance(value, dict) and "path" not in value else {"": value}


def with_paths(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value of a setting that names data sets, with every path in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_paths(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    if "path" in value:
        return value | {"path": with_paths(value["path"], change)}
    return {name: with_paths(item, change) for name, item in value.items()}


def paths_in(value: Any) -> list[str]:
    """Return the paths in the value of a setting that names data sets."""
    found: list[str] = []

    def note(path: str) -> str:
        found.append(path)
        return path

    with_paths(value, note)
    return found


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Where prompts come from, and how a row becomes token ids."""

    path: str | list = ""
    """Data set: a JSONL, JSON, CSV or Parquet file, a folder written by `datasets`, the URL of such a file,
    `name[:config][@revision]` of a data set on the hub, or `reasoning_gym:<task>`. A list mixes several; an item is one
    of these forms, or a mapping such as {path: a.jsonl, weight: 2}, see the page on data."""
    eval_path: str | dict | None = None
    """Held-out prompts in one of the same forms; a mapping from names to them gives several sets, each with metrics of
    its own, such as {math: math.jsonl, aime: {path: aime.jsonl, max_samples: 30}}. null disables evaluation."""
    split: str | None = None
    """Split of a folder or of a data set on the hub; null takes `train`, or the only one. The hub also takes a part,
    such as `train[:1000]`."""
    eval_split: str | None = None
    """Split of `eval_path`; null takes `test` or `validation`, or the only one."""
    max_samples: int | None = None
    """Maximum number of training prompts, taken from the start of each data set of `path`; null takes all."""
    format: Format = "auto"
    """Format of the rows: `plain` has the two columns below; every other format is named after the trainer or data set
    that has it, see the page on data. auto takes plain where the two columns exist, and otherwise recognises the format
    by the columns of the first row."""
    prompt_column: str = "prompt"
    """Column of the prompt: text, or a list of chat messages with `role` and `content`. A name such as `a.b` leads
    into the dictionary of column `a`."""
    answer_column: str | None = "answer"
    """Column of the answer, or of a list of right answers, which rule functions compare with; null if the data has
    none."""
    system_message: str | None = None
    """System message before every chat prompt; needs chat messages or `chat: true`. null adds none."""
    template_path: str | None = None
    """Conversation template, JSON with chat_template, system_message, stop_ids, end_of_assistant and
    response_format_tags; null takes the tokenizer's chat template."""
    chat: bool = False
    """Make a text prompt one user message and apply the chat template to it."""
    max_prompt_tokens: int = 512
    """Maximum length of a prompt in tokens; `overlong_prompts` says what happens to a longer one."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Handling of prompts longer than `max_prompt_tokens`: exit with an error, or drop them and print how many."""
    shuffle: bool = True
    """Draw a new order for every pass over the prompts from `run.seed`; false keeps the order of the data set."""
    num_generated: int = 10_000
    """Number of rows that `reasoning_gym:<task>` generates."""
    max_eval_samples: int = 256
    """Maximum number of held-out prompts in an evaluation, taken from the start of each data set of `eval_path`."""
    task_options: dict = field(default_factory=dict)
    """Arguments of the reasoning_gym task, for example {min_terms: 2, max_terms: 3}."""

    @property
    def training_sources(self) -> list[DataSource]:
        """The data sets of `path`."""
        return sources_of(self.path)

    @property
    def evaluation_sources(self) -> dict[str, DataSource]:
        """Name -> data set of `eval_path`; the name is empty where `eval_path` is one data set."""
        return {name: source_of(value) for name, value in named_sets(self.eval_path).items()}

    def of_source(self, source: DataSource) -> "PromptsConfig":
        """Return the settings of one data set; what it does not set itself is as for all."""
        own: dict[str, Any] = {
            name: value
            for name in ("format", "prompt_column", "answer_column", "task_options")
            if (value := getattr(source, name)) is not None
        }
        if source.split is not None:
            own |= {"split": source.split, "eval_split": source.split}
        return replace(self, **own)
