"""A conversation with a tool: calls of scripted turns reach a real tool, whose results stand in the transcript."""

from collections.abc import Sequence
from pathlib import Path

from hybrid_rl.batch import ConversationStart, Prompt
from hybrid_rl.config import EnvironmentConfig, PromptsConfig
from hybrid_rl.conversations.conversation import Limits
from hybrid_rl.conversations.loop import run_conversations
from hybrid_rl.conversations.setup import Environments
from hybrid_rl.data.template import Template
from hybrid_rl.data.tool_calls import make_tool_format
from hybrid_rl.data.turns import TurnEncoder
from hybrid_rl.engines import Generation, Request
from hybrid_rl.environments.pool import EnvironmentPool
from tests.data.test_turns import CHATML, IM_END, make_tokenizer

TOOL = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b
'''
TURNS = [
    '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><|im_end|>',
    '<tool_call>{"name": "divide", "arguments": {}}</tool_call><|im_end|>',
    "It is 42.<|im_end|>",
]


class Script:
    """A RequestStream whose model says what is written down."""

    def __init__(self, turns: Sequence[str], tokenizer) -> None:
        self._turns = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
        self._requests: list[Request] = []
        self.prompts: list[list[int]] = []

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        self._requests += requests
        self.prompts += [request.token_ids for request in requests]

    def receive(self) -> list[tuple[int, Generation]]:
        found = []
        for request in self._requests:
            ids = self._turns.pop(0)
            found.append((request.number, Generation(token_ids=ids, logprobs=[-1.0] * len(ids), is_truncated=False)))
        self._requests = []
        return found


def test_calls_are_answered_and_counted(tmp_path: Path):
    file = tmp_path / "tools_file.py"
    file.write_text(TOOL)
    tokenizer = make_tokenizer(CHATML)
    encoder = TurnEncoder(
        tokenizer,
        PromptsConfig(max_prompt_tokens=2000),
        Template(),
        make_tool_format=lambda: make_tool_format("text", tokenizer, CHATML, load_parser=lambda *_: None),
    )
    prompt = Prompt(
        prompt_id=0, text="", token_ids=[5], messages=[{"role": "user", "content": "What is 6 times 7?"}], answer="42"
    )
    start = ConversationStart(prompt=prompt, sequence_id=0, seed=1, environment_seed=1)
    script = Script(TURNS, tokenizer)
    with EnvironmentPool("tools", arguments={"tools": [f"{file}:multiply"]}, timeout_s=20.0, num_workers=1) as pool:
        environments = Environments(pool=pool, encoder=encoder, config=EnvironmentConfig(tools=[f"{file}:multiply"]))
        limits = Limits(max_turns=8, max_turn_tokens=200, max_tokens=2000)
        (rollout,) = run_conversations(
            script, [start], environments=environments, limits=limits, stop_token_ids=frozenset([IM_END])
        )
    assert [turn.role for turn in rollout.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert "multiply" in rollout.prompt.text and rollout.turns[0].text == TURNS[0].removesuffix("<|im_end|>")
    assert "<tool_response>42</tool_response>" in rollout.turns[1].text
    assert "<tool_response>error: " in rollout.turns[3].text and "divide" in rollout.turns[3].text
    counts = {name.removeprefix("environment/"): value for name, value in rollout.counts.items()}
    assert (counts["turns"], counts["tool_calls"], counts["failed_tool_calls"]) == (3, 2, 1)
    assert rollout.text.endswith("It is 42.") and not rollout.is_truncated
    for before, turn in zip(script.prompts[1:], (2, 4), strict=True):
        num_tokens = sum(each.num_tokens for each in rollout.turns[:turn])
        assert before == [*rollout.prompt.token_ids, *rollout.response_ids[:num_tokens]]
