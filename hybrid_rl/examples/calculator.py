"""Products of two numbers, with a calculator that the model may call.

No small model can multiply such numbers by itself, so calling the tool is the only way to be right. The conversation
ends with the first turn that calls no tool, which is the answer.
"""

from hybrid_rl.environments.protocol import Message
from hybrid_rl.environments.tools import ToolEnvironment


def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    return a * b


class Calculator(ToolEnvironment):
    """A question, whose right answer has the reward 1."""

    tools = (multiply,)

    def finish(self, messages: list[Message]) -> float:
        """Compare the answer with the row's."""
        return float(messages[-1]["content"].strip() == self.row["answer"])
