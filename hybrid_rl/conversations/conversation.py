"""One conversation: its tokens and turns so far, and what follows from an answer of the engine or the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rl.batch import SAMPLED_ROLE, ConversationStart, Prompt, Rollout, Turn
from hybrid_rl.data.turns import TurnEncoder, messages_of
from hybrid_rl.engines import Generation, Request
from hybrid_rl.environments.protocol import Reset, Step
from hybrid_rl.seeds import request_seed

COUNTS = {"num_tool_calls": "tool_calls", "num_failed_tool_calls": "failed_tool_calls"}
"""Key of an environment's info -> name of a metric, which is its sum over a conversation."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a conversation."""

    max_turns: int
    max_turn_tokens: int
    """Tokens of a turn."""
    max_tokens: int
    """Tokens of all turns and observations."""


class Conversation:
    """A conversation that is being generated."""

    def __init__(
        self, start: ConversationStart, limits: Limits, encoder: TurnEncoder, stop_token_ids: frozenset[int]
    ) -> None:
        """Take what the conversation begins with; `begin` starts it, also again after its environment was lost.

        Args:
            encoder: makes token ids of observations.
            stop_token_ids: end a turn.
        """
        self.start = start
        self.num_restarts = 0
        self.failure: str | None = None
        """Reason why the environment has failed; None if it has not."""
        self._limits = limits
        self._encoder = encoder
        self._stop_token_ids = stop_token_ids
        self._clear()

    def _clear(self) -> None:
        self.prompt: Prompt = self.start.prompt
        self._tools: list[dict[str, Any]] | None = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._turns: list[Turn] = []
        self._prefill = ""
        self._is_cut = False
        self._end = ""  # limit that has ended the conversation
        self._info: dict[str, float] = {}
        self.environment_s = 0.0
        """Seconds in which the conversation has waited for its environment."""

    @property
    def row(self) -> dict[str, Any]:
        """The row of the data for the environment: its columns, the prompt also as messages and as the text that the
        model reads, and a seed."""
        prompt = self.start.prompt
        messages = messages_of(prompt)
        text = prompt.text if prompt.user_text is None else prompt.user_text
        own = {"prompt": prompt.messages or text, "prompt_messages": messages, "prompt_text": prompt.text}
        return {"seed": self.start.environment_seed, **prompt.metadata, **own, "answer": prompt.answer}

    def begin(self, reset: Reset) -> None:
        """Take what the environment says first.

        Raises:
            ConfigError: it cannot be a prompt.
        """
        self._clear()
        self._tools = reset.tools
        self.prompt = self._encoder.prompt(
            self.start.prompt, reset.observation, reset.tools, is_verbatim=reset.is_verbatim
        )
        self._prefill = self.prompt.prefill

    @property
    def num_turns(self) -> int:
        """Number of sampled turns."""
        return sum(turn.is_sampled for turn in self._turns)

    def request(self, number: int) -> Request:
        """Return the request of the next turn."""
        left = self._limits.max_tokens - len(self._ids)
        seed = self.start.seed
        return Request(
            number=number,
            token_ids=[*self.prompt.token_ids, *self._ids],
            max_tokens=min(left, self._limits.max_turn_tokens),
            seed=request_seed(seed, self.num_turns) if seed is not None and self.num_turns else seed,
        )

    def add_turn(self, generation: Generation) -> str | dict[str, Any]:
        """Add a sampled turn; return it as the environment gets it."""
        ids = generation.token_ids
        self._is_cut = generation.is_truncated
        text = self._text([*self.prompt.token_ids, *self._ids], ids)
        self._ids += ids
        self._logprobs += generation.logprobs
        self._turns.append(Turn(role=SAMPLED_ROLE, num_tokens=len(ids), text=text))
        whole = self._prefill + text
        if self._tools is None:
            return whole
        parsed = self._encoder.tool_format.parse(whole, self._tools)
        return {"role": SAMPLED_ROLE, "content": parsed.content, "tool_calls": parsed.tool_calls}

    def _text(self, before: list[int], token_ids: list[int]) -> str:
        """Return the text of tokens that end with the last turn, without its stop token."""
        stop_token_ids = frozenset[int]() if self._is_cut else self._stop_token_ids
        return self._encoder.turn_text(before, token_ids, stop_token_ids=stop_token_ids)

    def add_step(self, step: Step) -> bool:
        """Take the environment's answer to the last turn; return whether another turn follows.

        Raises:
            ConfigError: the observation cannot be written.
        """
        self._turns[-1] = replace(self._turns[-1], reward=step.reward)
        self._add_info(step.info)
        if step.done:
            return False
        if self.num_turns == self._limits.max_turns:
            self._end = "turns"
            return False
        stop_token = None if self._is_cut or not self._ids else self._ids[-1]
        glue = self._encoder.glue(
            self.start.prompt,
            step.observation,
            stop_token=stop_token,
            has_tools=self._tools is not None,
            is_verbatim=step.is_verbatim,
        )
        if len(self._ids) + len(glue.token_ids) >= self._limits.max_tokens:
            self._end = "tokens"
            return False
        self._turns.append(Turn(role=_role_of(step), num_tokens=len(glue.token_ids), text=glue.text))
        self._ids += glue.token_ids
        self._prefill = glue.prefill
        return True

    def _add_info(self, info: Mapping[str, Any]) -> None:
        """Add counts of tool calls, and keep other numbers of the last answer that has them."""
        for name, value in info.items():
            if isinstance(value, bool | int | float):
                known = COUNTS.get(name)
                if known:
                    self._info[known] = self._info.get(known, 0.0) + value
                else:
                    self._info[f"info/{name}"] = float(value)

    def fail(self, reason: str) -> None:
        """End the conversation where it is, because its environment has failed."""
        self.failure = reason
        if self._turns and not self._turns[-1].is_sampled:
            last = self._turns.pop()
            del self._ids[len(self._ids) - last.num_tokens :]

    def rollout(self) -> Rollout:
        """Return the conversation as a response to its prompt."""
        is_truncated = self._end == "tokens" or (self._is_cut and len(self._ids) >= self._limits.max_tokens)
        num_sampled = sum(turn.num_tokens for turn in self._turns if turn.is_sampled)
        counts = {
            "turns": float(self.num_turns),
            "tool_calls": 0.0,
            "failed_tool_calls": 0.0,
            **self._info,
            "truncated_by_turns": float(self._end == "turns"),
            "truncated_by_tokens": float(is_truncated),
            "restarts": float(self.num_restarts),
            "failed": float(self.failure is not None),
            "seconds": self.environment_s,
            "sampled_share": num_sampled / len(self._ids) if self._ids else 1.0,
        }
        text = self._text(self.prompt.token_ids, self._ids)
        return Rollout(
            prompt=self.prompt,
            sequence_id=self.start.sequence_id,
            response_ids=list(self._ids),
            rollout_logprobs=list(self._logprobs),
            is_truncated=is_truncated,
            text=self.prompt.prefill + text,
            turns=list(self._turns),
            counts={f"environment/{name}": value for name, value in counts.items()},
        )


def _role_of(step: Step) -> str:
    """Return the role of an observation: of its last message."""
    return "user" if isinstance(step.observation, str) or not step.observation else step.observation[-1]["role"]
