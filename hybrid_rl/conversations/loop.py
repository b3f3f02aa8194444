"""Conversations of a batch: each goes on as soon as its environment, or the engine, has answered."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from hybrid_rl.batch import ConversationStart, Prompt, Rollout
from hybrid_rl.config import ConfigError, RolloutConfig
from hybrid_rl.conversations.conversation import Conversation, Limits
from hybrid_rl.conversations.setup import Environments
from hybrid_rl.engines import Request, RequestStream, RolloutEngine, Sampling
from hybrid_rl.environments.process import Answer
from hybrid_rl.environments.protocol import Reset, Step
from hybrid_rl.seeds import request_seed

POLL_S = 0.005
"""Longest wait for environments while the engine decodes."""
IDLE_POLL_S = 0.1
"""Longest wait for environments while the engine has no request."""
GATHER_S = 0.01
"""Longest time for which a request waits for others, because a message with several costs the engine less."""


def collect_conversations(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    environments: Environments,
    config: RolloutConfig,
    *,
    stop_token_ids: Sequence[int],
    run_seed: int,
    step: int,
    top_p: float = 1.0,
    environment_step: int | None = None,
) -> list[Rollout]:
    """Return rollout.group_size conversations per prompt; a group's conversations are consecutive.

    Args:
        prompts:        this rank's prompts.
        environments:   answer the turns.
        config:         how turns are sampled; temperature 0 is greedy decoding, without log-probs.
        stop_token_ids: end a turn, which keeps the token.
        run_seed, step: determine samples and environments; the same for any number of ranks if
            rollout.seed_per_request. Log-probs may differ in their last bits, because the time at which an environment
            answers decides which requests the engine computes together; see Environments.in_rounds.
        top_p:          see Sampling.
        environment_step: number that determines the seeds of environments; None is step.
    Raises:
        ConfigError: an environment has failed, and environment.on_error is raise.
    """
    is_greedy = config.temperature == 0
    starts = [
        ConversationStart(
            prompt=prompt,
            sequence_id=(sequence_id := prompt.prompt_id * config.group_size + k),
            seed=request_seed(run_seed, step, sequence_id) if config.seed_per_request and not is_greedy else None,
            environment_seed=request_seed(
                run_seed, step if environment_step is None else environment_step, prompt.prompt_id
            ),
        )
        for prompt in prompts
        for k in range(config.group_size)
    ]
    if starts and not config.seed_per_request and not is_greedy:
        engine.seed(request_seed(run_seed, step, starts[0].sequence_id))
    limits = Limits(
        max_turns=environments.config.max_turns,
        max_turn_tokens=environments.config.max_turn_tokens or config.max_response_tokens,
        max_tokens=config.max_response_tokens,
    )
    run = partial(run_conversations, environments=environments, limits=limits, stop_token_ids=frozenset(stop_token_ids))
    return engine.converse(starts, Sampling.of(config, stop_token_ids, top_p=top_p), run)


def run_conversations(
    stream: RequestStream,
    starts: Sequence[ConversationStart],
    *,
    environments: Environments,
    limits: Limits,
    stop_token_ids: frozenset[int],
) -> list[Rollout]:
    """Generate conversations through a stream, and return them in order; see RunConversations.

    Args:
        environments:   answer the turns.
        limits:         of each conversation.
        stop_token_ids: end a turn, which keeps the token.
    Raises:
        ConfigError: an environment has failed, and environment.on_error is raise.
    """
    conversations = [Conversation(start, limits, environments.encoder, stop_token_ids) for start in starts]
    loop = _Loop(conversations, stream, environments)
    try:
        while not loop.is_done:
            loop.turn()
    finally:
        loop.end()
    return [conversation.rollout() for conversation in conversations]


class _Loop:
    """Conversations, the requests of the engine and the calls of environments."""

    def __init__(self, conversations: list[Conversation], stream: RequestStream, environments: Environments) -> None:
        self._conversations = conversations
        self._stream = stream
        self._pool = environments.pool
        self._config = environments.config
        self._waiting = deque(range(len(conversations)))  # not begun
        self._asked: dict[int, float] = {}  # conversation whose environment is asked -> since when
        self._requests: dict[int, int] = {}  # number of a request -> conversation
        self._numbers = itertools.count()
        self._ready: list[Request] = []
        self._in_rounds = environments.in_rounds
        self._ready_since = 0.0

    @property
    def is_done(self) -> bool:
        """Whether all conversations are over."""
        return not (self._waiting or self._asked or self._requests or self._ready)

    def turn(self) -> None:
        """Pass on what has arrived from the environments and from the engine."""
        self._begin()
        for answer in self._pool.receive(self._wait_s()):
            self._take(answer)
        if self._ready and self._is_time_to_submit():
            self._submit()
        for number, generation in self._stream.receive():
            key = self._requests.pop(number, None)
            if key is not None:  # otherwise the conversation has lost its environment meanwhile
                turn = self._conversations[key].add_turn(generation)
                self._asked[key] = time.monotonic()
                self._pool.step(key, turn)

    def _is_time_to_submit(self) -> bool:
        if self._in_rounds:
            return not self._asked and not self._stream.num_running
        return not self._asked or time.monotonic() >= self._ready_since + GATHER_S

    def _submit(self) -> None:
        self._ready.sort(key=lambda request: self._requests[request.number])
        self._stream.submit(self._ready)
        self._ready = []

    def end(self) -> None:
        """End the conversations that are not over, after an error."""
        for key in (*self._asked, *self._requests.values()):
            self._pool.end(key)

    def _wait_s(self) -> float:
        if self._ready and self._is_time_to_submit():
            return 0.0
        return POLL_S if self._stream.num_running or self._ready else IDLE_POLL_S

    def _begin(self) -> None:
        """Start conversations up to environment.max_concurrent."""
        limit = self._config.max_concurrent or len(self._conversations)
        while self._waiting and len(self._asked) + len(self._requests) < limit:
            self._reset(self._waiting.popleft())

    def _reset(self, key: int) -> None:
        self._asked[key] = time.monotonic()
        self._pool.reset(key, self._conversations[key].row)

    def _take(self, answer: Answer) -> None:
        """Take an answer of an environment."""
        key, conversation = answer.key, self._conversations[answer.key]
        if (since := self._asked.pop(key, None)) is not None:
            conversation.environment_s += time.monotonic() - since
        if answer.failure is not None:
            self._take_failure(key, answer)
            return
        try:
            if isinstance(answer.result, Step):
                goes_on = conversation.add_step(answer.result)
            else:
                assert isinstance(answer.result, Reset)
                conversation.begin(answer.result)
                goes_on = True
        except ConfigError as error:  # what the environment says cannot be written
            self._fail(key, str(error))
            return
        if goes_on:
            number = next(self._numbers)
            self._requests[number] = key
            self._ready_since = self._ready_since if self._ready else time.monotonic()
            self._ready.append(conversation.request(number))
        else:
            self._pool.end(key)

    def _take_failure(self, key: int, answer: Answer) -> None:
        """Start a conversation again whose process is lost through no fault of its own, or end it."""
        conversation = self._conversations[key]
        self._requests = {number: other for number, other in self._requests.items() if other != key}
        self._ready = [request for request in self._ready if request.number in self._requests]
        if answer.is_lost and conversation.num_restarts < self._config.max_restarts:
            conversation.num_restarts += 1
            self._reset(key)
        else:
            self._fail(key, answer.failure or "")

    def _fail(self, key: int, reason: str) -> None:
        """End a conversation whose environment has failed.

        Raises:
            ConfigError: environment.on_error is raise.
        """
        self._pool.end(key)
        conversation = self._conversations[key]
        conversation.fail(reason)
        if self._config.on_error == "raise":
            prompt_id = conversation.start.prompt.prompt_id
            raise ConfigError(
                f"environment: the environment of prompt {prompt_id} fails in turn {conversation.num_turns}: {reason}; "
                "mend it, or count such conversations with environment.on_error = zero"
            )
