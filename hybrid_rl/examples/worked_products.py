"""Products with a calculator, for a chat model that knows no tools: worked examples stand before the question.

The conversation ends with the first turn that calls no tool. Its last number is the answer.
"""

import re
from typing import Any

from hybrid_rl.environments.protocol import Message, Reset
from hybrid_rl.environments.tools import ToolEnvironment

QUESTION = "Solve the following multiplication: {a} * {b}. Give only the result as your final answer."
"""The question of reasoning_gym's task `products`."""
EXAMPLES = ((12, 34), (505, 71), (88, 640))
"""Numbers of the worked examples."""


def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    return a * b


class WorkedProducts(ToolEnvironment):
    """A question after worked examples; the right answer has the reward 1."""

    tools = (multiply,)

    def reset(self, row: dict[str, Any]) -> Reset:
        """Return the examples, the row's question and the tool."""
        opening = super().reset(row)
        worked = [message for a, b in EXAMPLES for message in work(a, b)]
        return Reset(observation=[*worked, *self.messages], tools=opening.tools)

    def finish(self, messages: list[Message]) -> float:
        """Compare the last number of the answer with the row's answer."""
        numbers = re.findall(r"\d+", messages[-1]["content"].replace(",", ""))
        return float(numbers[-1:] == [self.row["answer"]])


def work(a: int, b: int) -> list[Message]:
    """Return the conversation in which a product is calculated by the tool."""
    function = {"name": "multiply", "arguments": {"a": a, "b": b}}
    call = {"id": f"call_{a}", "type": "function", "function": function}
    return [
        {"role": "user", "content": QUESTION.format(a=a, b=b)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": f"The result is {a * b}."},
    ]
