"""PyTorch reference of every kernel: the oracle of their tests, and the implementation on a CPU.

Shape letters: N packed tokens, n rows of one chunk, H hidden, V vocabulary, B sequences, T response tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED_TARGET = -100
CHUNK_ROWS = 1024  # with a vocabulary of 152,000 words, 0.6 GB of float32 logits

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_MM_WIDENS = "dtype" in torch.ops.aten.mm.overloads()  # 16-bit GEMM with float32 output, on CUDA
_LOWEST_LOG_PROB = -1e4  # exp of it is 0 even in float64, so clamping only turns 0 * -inf into 0


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError, which lists names and shapes, unless all shapes are equal."""
    if len({tuple(t.shape) for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"shapes must be equal, got {shapes}")


def check_head_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless the shapes are [N, H], [V, H], [N] and [V], or bias is None."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [N, H] and weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [N] with N = {len(hidden)}, got {list(targets.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] with V = {len(weight)}, got {list(bias.shape)}")


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, and float32 for all smaller dtypes."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """Transform of logits before the softmax: scaled, then soft-capped, then divided by the temperature."""

    temperature: float
    logit_scale: float
    softcap: float | None

    def __post_init__(self) -> None:
        for name in ("temperature", "logit_scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and greater than 0, got {value}")

    @property
    def factor(self) -> float:
        """Derivative of `apply` without the cap."""
        return self.logit_scale / self.temperature

    def apply(self, logits: Tensor) -> Tensor:
        """Return the transformed logits; overwrites its argument."""
        if self.softcap is not None:
            return logits.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return logits.mul_(self.factor) if self.logit_scale != 1 else logits.div_(self.temperature)

    def slope(self, transformed: Tensor) -> Tensor | None:
        """Return the derivative of `apply` at a result `transformed`, divided by factor; None if it is 1 everywhere."""
        if self.softcap is None:
            return None
        return transformed.mul(self.temperature / self.softcap).square_().neg_().add_(1)


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the targets and entropies, without storing all [N, V] logits.

    Logits and all sums are in float32; backward computes the logits of each chunk again. Both results have first
    derivatives with respect to hidden, weight and bias. In this order

        logits = hidden weight^T + bias;  x = logits * logit_scale;  y = softcap tanh(x / softcap);  z = y / temperature

    and the distribution is softmax(z).

    Args:
        hidden:      [N, H] float32, bfloat16 or float16; N may be 0.
        weight:      [V, H]; the output embedding. Pass the parameter itself: ZeRO-3 swaps its data.
        targets:     [N] int64 in [0, V), or -100 for a row to ignore, whose hidden states may be NaN.
        temperature: divides the logits before the softmax.
        bias:        [V] or None; added to the logits.
        logit_scale: factor on the logits, as in Cohere and, inverted, in Granite.
        softcap:     bound of the scaled logits, as in Gemma 2; None for no bound.
    Returns:
        logprobs, entropy: [N] float32 (float64 for float64 inputs) in nats, 0 in ignored rows.
    Raises:
        ValueError: shapes do not fit, or temperature, logit_scale or softcap is not finite and positive.
    """
    check_head_shapes(hidden, weight, targets, bias)
    transform = LogitTransform(temperature=temperature, logit_scale=logit_scale, softcap=softcap)
    # Selected outside of the autograd function: where() also selects gradients, so no NaN of an ignored row spreads.
    is_kept = targets != IGNORED_TARGET
    hidden = torch.where(is_kept[:, None], hidden, 0)
    targets = torch.where(is_kept, targets, 0)
    logprobs, entropy = _FusedLogprobs.apply(hidden, weight, bias, targets, transform)
    return torch.where(is_kept, logprobs, 0), torch.where(is_kept, entropy, 0)


class _FusedLogprobs(torch.autograd.Function):
    """fused_logprobs for inputs without ignored rows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.transform = transform
        ctx.set_materialize_grads(False)  # the gradient of an unused entropy is then None, which saves its computation
        operand = _operand(weight)
        logprobs = torch.empty(len(hidden), dtype=at_least_float32(hidden.dtype), device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(len(hidden)):
            log_probs = _log_softmax(_logits(hidden[rows], operand, bias, transform))
            logprobs[rows] = log_probs.gather(1, targets[rows, None]).squeeze(1)
            entropy[rows] = _entropy(log_probs.exp(), log_probs.clamp_min_(_LOWEST_LOG_PROB)).squeeze(1)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        operand = _operand(weight)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=at_least_float32(weight.dtype)) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=at_least_float32(bias.dtype)) if needs_bias else None
        for rows in _chunks(len(hidden)):
            logits = _logits(hidden[rows], operand, bias, ctx.transform)
            slope = ctx.transform.slope(logits)
            factor = ctx.transform.factor
            grad_parts = (None if g is None else g[rows, None] * factor for g in (grad_logprobs, grad_entropy))
            grad_logits = _grad_logits(_log_softmax(logits), targets[rows, None], *grad_parts)
            if slope is not None:
                grad_logits *= slope
            if grad_hidden is not None:
                grad_hidden[rows] = _matmul(grad_logits, operand)
            if grad_weight is not None:
                grad_weight += _matmul(grad_logits.t(), _operand(hidden[rows]))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _chunks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK_ROWS) for start in range(0, num_rows, CHUNK_ROWS))


def _operand(x: Tensor) -> Tensor:
    """Return x in the dtype for `_matmul`: 16 bits if torch can multiply them into float32, else at least float32."""
    if x.is_cuda and x.dtype in _HALF_DTYPES and _MM_WIDENS:
        return x
    return x.to(at_least_float32(x.dtype))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in at least float32; b is an `_operand`, and a is cast to its dtype."""
    if b.dtype in _HALF_DTYPES:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    with torch.autocast(b.device.type, enabled=False):  # autocast would round to 16 bits
        return a.to(b.dtype) @ b


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """Return the transformed logits [n, V]; hidden is [n, H], weight an `_operand` [V, H]."""
    logits = _matmul(hidden, weight.t())
    if bias is not None:
        logits += bias
    return transform.apply(logits)


def _log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probabilities [n, V] of all words; overwrites the logits."""
    # On a CPU, torch.log_softmax sums exponentials sequentially, which is inaccurate for large V; sum() adds pairwise.
    logits -= logits.amax(dim=1, keepdim=True)
    logits -= logits.exp().sum(dim=1, keepdim=True).log()
    return logits


def _entropy(probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return the entropies [n, 1] of distributions [n, V]; overwrites probs. log_probs must be finite: 0 log 0 is 0."""
    return -probs.mul_(log_probs).sum(dim=1, keepdim=True)


def _grad_logits(
    log_probs: Tensor, targets: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Return the gradient of the logits, [n, V]: g (onehot - p) - e p (log p + H).

    g [n, 1] is the gradient of the target's log-prob and e [n, 1] of the entropy H; overwrites log_probs.
    """
    probs = log_probs.exp()
    factor = torch.zeros_like(log_probs[:, :1])
    if grad_entropy is not None:
        log_probs.clamp_min_(_LOWEST_LOG_PROB)
        entropy = _entropy(probs.clone(), log_probs)
        factor = log_probs.add_(entropy).mul_(grad_entropy)
    if grad_logprobs is None:
        return -probs.mul_(factor)
    grad = probs.mul_(factor + grad_logprobs).neg_()
    return grad.scatter_add_(1, targets, grad_logprobs)


@torch.no_grad()
def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap_values: Tensor | None = None,
    *,
    turn_ends: Tensor | None = None,
    turn_gamma: float = 1.0,
) -> Tensor:
    """Return generalized advantage estimates over the sampled tokens of each row.

    Slots that are masked between two sampled tokens, such as observations of an environment, are skipped: the state
    after a token is the next sampled token, wherever it lies, so gamma and lambda count sampled tokens.

        A_t = r_t + g_t V_u - V_t + g_t lambda A_u,  u the sampled token after t

    Args:
        token_rewards, values: [B, T] float32; reward after token t, and value before it; read inside the mask only.
        response_mask:    [B, T] bool or 0 and 1; a row may have gaps or no token at all.
        gamma:            discount per token; g_t.
        gae_lambda:       decay of the estimate per token, in addition to gamma; one number, or one per row [B].
        bootstrap_values: [B] or None; value after the last sampled token; None is 0.
        turn_ends:        [B, T] bool or None; tokens whose g_t is gamma * turn_gamma, the last ones of turns that
                          another turn follows; read inside the mask, and not at the last sampled token.
        turn_gamma:       discount per turn, in addition to gamma.
    Returns:
        advantages: [B, T] float32 (float64 if token_rewards is), 0 outside the mask, without gradient.
    Raises:
        ValueError: shapes differ.
    Source: Schulman et al. 2016, eq. 16.
    """
    check_same_shape(token_rewards=token_rewards, values=values, response_mask=response_mask)
    if isinstance(gae_lambda, Tensor):
        check_same_shape(gae_lambda=gae_lambda, rows=response_mask.new_empty(len(response_mask)))
    mask = response_mask.bool()
    rewards = torch.where(mask, token_rewards, 0).to(at_least_float32(token_rewards.dtype))
    values = torch.where(mask, values, 0).to(rewards)

    advantages = torch.zeros_like(rewards)
    advantage = rewards.new_zeros(len(rewards))
    # The product is rounded once, from float64, so that one lambda for all rows and one per row give the same result.
    decay = (gamma * torch.as_tensor(gae_lambda, dtype=torch.float64, device=rewards.device)).to(rewards.dtype)
    next_value = advantage if bootstrap_values is None else bootstrap_values.to(advantage)
    check_same_shape(bootstrap_values=next_value, rows=advantage)
    per_turn: Tensor | float = 1.0
    if turn_ends is not None:
        check_same_shape(turn_ends=turn_ends, response_mask=response_mask)
        has_next = mask.flip(1).cumsum(1).flip(1) > 1
        per_turn = torch.where(turn_ends.bool() & has_next, turn_gamma, 1.0).to(rewards)
    for t in reversed(range(rewards.shape[1])):
        factor = per_turn if isinstance(per_turn, float) else per_turn[:, t]
        delta = rewards[:, t] + gamma * factor * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + decay * factor * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    return torch.where(mask, advantages, 0)
