"""Prompts for the tiny policy, and environments in worker processes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt
from hybrid_rl.config import EnvironmentConfig, PromptsConfig
from hybrid_rl.conversations.setup import Environments
from hybrid_rl.data.template import Template
from hybrid_rl.data.tool_calls import ToolFormat
from hybrid_rl.data.turns import TurnEncoder
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.models.tokenizer import load_tokenizer


def no_tools() -> ToolFormat:
    raise AssertionError("these conversations have no tools")


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny / "policy"))


@pytest.fixture
def text_prompts(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Three text prompts of different lengths, with answers."""
    texts = ["3+4=", "1+1=", "12+3="]
    return [
        Prompt(prompt_id=i, text=text, token_ids=tokenizer(text)["input_ids"], answer=str(i))
        for i, text in enumerate(texts)
    ]


@pytest.fixture
def start(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Callable[..., Environments]]:
    """Return a function that starts environments of a class `E` with this source."""
    with ExitStack() as opened:

        def make(
            source: str, *, arguments: dict[str, Any] | None = None, in_rounds: bool = True, **settings: Any
        ) -> Environments:
            path = tmp_path / "environment_file.py"
            path.write_text(source)
            config = EnvironmentConfig(**{"name": f"{path}:E", "timeout_s": 20.0, "num_workers": 1, **settings})
            assert config.name
            pool = EnvironmentPool(
                config.name,
                arguments=arguments,
                timeout_s=config.timeout_s,
                num_workers=config.num_workers,
            )
            opened.enter_context(pool)
            encoder = TurnEncoder(tokenizer, PromptsConfig(), Template(), make_tool_format=no_tools)
            return Environments(pool=pool, encoder=encoder, config=config, in_rounds=in_rounds)

        yield make
