"""Makes what conversations need besides the engine: processes of environments, and the encoder of turns."""

from dataclasses import dataclass

from hybrid_rl.config import Config, EnvironmentConfig, check
from hybrid_rl.data.chat import chat_template_of
from hybrid_rl.data.loading import Data
from hybrid_rl.data.template import load_template
from hybrid_rl.data.tool_calls import ToolFormat, make_tool_format
from hybrid_rl.data.turns import TurnEncoder
from hybrid_rl.engines.vllm.tool_parsers import load_tool_parser
from hybrid_rl.environments.pool import EnvironmentPool

TOOLS = "tools"
"""Built-in environment of environment.tools."""


@dataclass(frozen=True, kw_only=True)
class Environments:
    """What conversations need besides the engine."""

    pool: EnvironmentPool
    encoder: TurnEncoder
    config: EnvironmentConfig
    in_rounds: bool = False
    """Whether all conversations wait for each other in every turn, so that a run repeats itself bit for bit: which
    requests the engine computes together does not depend on the time at which environments answer."""

    def close(self) -> None:
        """End the processes of the environments."""
        self.pool.close()


def start_environments(config: Config, data: Data) -> Environments | None:
    """Return the environments of a run, after starting a first process; None for a run without conversations.

    Raises:
        ConfigError: the environment cannot be loaded, the chat template has no tool calls that can be read, or it
            rewrites earlier turns.
    """
    settings = config.environment
    if not settings.is_used:
        return None
    template = load_template(config.prompts.template_path, data.tokenizer)
    prompts = [*data.loader.prompts, *data.eval_prompts]
    is_chat = any(prompt.messages is not None or prompt.user_text is not None for prompt in prompts)
    check(is_chat or not settings.tools, "environment.tools: need chat prompts: set prompts.chat = true")

    def tool_format() -> ToolFormat:
        source = chat_template_of(data.tokenizer, template, "environment")
        return make_tool_format(settings.tool_parser, data.tokenizer, source, load_parser=load_tool_parser)

    encoder = TurnEncoder(data.tokenizer, config.prompts, template, make_tool_format=tool_format)
    if settings.tools or settings.tool_parser:  # otherwise the first conversation with tools makes the format
        _ = encoder.tool_format
    if is_chat and settings.rewritten_history == "raise":
        check(
            not encoder.rewrites_history(),
            "environment.rewritten_history = raise: the chat template writes earlier turns of the model in another "
            "way than the model did, for example without their thinking: keep the turns as they were sampled with "
            "environment.rewritten_history = keep, or give another template with prompts.template_path",
        )
    arguments = {**settings.arguments, **({"tools": settings.tools} if settings.tools else {})}
    pool = EnvironmentPool(
        settings.name or TOOLS,
        arguments=arguments,
        timeout_s=settings.timeout_s,
        num_workers=settings.num_workers,
        memory_limit_bytes=settings.memory_limit_bytes,
        environment_variables=settings.environment_variables,
    )
    return Environments(pool=pool, encoder=encoder, config=settings, in_rounds=config.run.deterministic)
