"""Floating-point operations of the models for the sequences of a step, at their real lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.shapes import Shapes


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations of the models of a run: 2 per weight and token, causal attention over each sequence, and the head.

    Every method returns None for a model of which they are not known, see ModelShape.counts_flops.
    """

    shapes: Shapes
    has_adapters: bool
    """Whether the actor's and the critic's weights have no gradient."""
    shares_prompts: bool
    """Whether the engine reads the prompt of a group once."""

    def generation(self, prompts: Mapping[int, int], sequences: Sequence[tuple[int, int, int]]) -> float | None:
        """Return the operations of generating responses.

        Args:
            prompts: id of each prompt -> its tokens.
            sequences: for each response the id of its prompt, the tokens of both, and the number of sampled tokens, for
                each of which the head runs once.
        """
        shape = self.shapes.actor
        if not shape.counts_flops([tokens for _, tokens, _ in sequences]):
            return None
        flops = sum(shape.forward_flops(tokens, tokens) for _, tokens, _ in sequences)
        if self.shares_prompts:
            read = [prompts[prompt_id] for prompt_id, _, _ in sequences]
            flops -= sum(shape.forward_flops(tokens, tokens) for tokens in read)
            once = [prompts[prompt_id] for prompt_id in {prompt_id for prompt_id, _, _ in sequences}]
            flops += sum(shape.forward_flops(tokens, tokens) for tokens in once)
        return flops + shape.head_flops(sum(sampled for _, _, sampled in sequences))

    def forward(self, name: str, lengths: Sequence[int], head_tokens: int) -> float | None:
        """Return the operations of a forward.

        Args:
            name: actor, critic, reference or reward.
            lengths: tokens of each sequence.
            head_tokens: tokens that the head reads.
        """
        shape = self._shape(name)
        if not shape.counts_flops(lengths):
            return None
        return sum(shape.forward_flops(length, length) for length in lengths) + shape.head_flops(head_tokens)

    def update(self, name: str, lengths: Sequence[int], head_tokens: int) -> float | None:
        """Return the operations of forward and backward of `actor` or `critic`, once over all sequences.

        The backward takes those of two forwards: one for the gradients of the inputs, and one for the gradients of the
        weights, which a model with adapters does not compute. What is computed twice to save memory counts once.
        """
        forward = self.forward(name, lengths, head_tokens)
        return None if forward is None else (2 if self.has_adapters else 3) * forward

    def _shape(self, name: str) -> ModelShape:
        """Return the shape of a model; the reference of a run with adapters is the actor without them."""
        found = {"critic": self.shapes.critic, "reference": self.shapes.reference, "reward": self.shapes.reward}
        return found.get(name) or self.shapes.actor
