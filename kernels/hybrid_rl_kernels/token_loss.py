"""A token loss with the gradients of hidden states and weight, in one pass over the logits, on a GPU.

A training step with fused_logprobs needs four matrix products: the logits in forward, the logits again in backward, and
two gradients. This module omits the second computation of the logits. The loss of a token is a function of its log-prob
and entropy, so as soon as they are known for a block of rows, the gradients follow from the numerators of the softmax
that the pass stores,

    numerators 2^(z - r) in bfloat16, where r is z of the row's target.

Except at the target, the gradient of the logits of a row is its numerators times one number. Instead of the [n, V]
matrix, that number scales hidden [n, H], before and after the products. No exponent overflows while the probability of
the target is at least 2^-60 of the largest one. Rows with a smaller one, and all rows if the entropy has a gradient or
the logits are capped, are rewritten, which reads and writes their numerators once more.

Shape letters: N tokens, n tokens of one block, H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rl_kernels import logit_passes as passes
from hybrid_rl_kernels import logprob_kernels as kernels
from hybrid_rl_kernels.logit_passes import MIB, Head, Path, RowResults, Work, blocks, matmul
from hybrid_rl_kernels.logprobs import Gradients
from hybrid_rl_kernels.reference import LogitTransform

NUMERATOR_BYTES = 528 * MIB
"""Memory of the numerators of one block; every block after the first adds to the weight's gradient in its dtype."""
FINISH_PROGRAMS = 8
"""Number of programs per block of rows in the finish kernel."""

LossOfLogprobs = Callable[[Tensor, Tensor, slice], Tensor]
"""Maps log-probs and entropies [n] of the tokens in a slice to their losses, of any shape, which are summed."""


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    loss_of_logprobs: LossOfLogprobs,
    path: Path | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, log-probs and entropies; see dispatch.token_loss_one_pass. Inputs are in bfloat16 or float32."""
    path = path or passes.choose_path(hidden, weight)
    return _TokenLoss.apply(hidden, weight, bias, targets, transform, loss_of_logprobs, path)


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Buffers that all blocks use in turn; n is the number of rows of the longest block."""

    numerators: Tensor
    """[n, V], rows aligned to 16 bytes."""
    scaled: Tensor
    """[n, H]; hidden states times the scale of their row."""
    total: Tensor
    """[n, H] float32; products with the weight."""
    tile_reference: Tensor
    """[tiles * n] float32; references of the numerators of each tile of words."""
    tile_width: int

    @staticmethod
    def empty(hidden: Tensor, num_words: int, num_rows: int, path: Path) -> "_Buffers":
        tile_width = passes.NUMERATOR_TILES.columns if path == "fused" else passes.ROW_TILE[1]
        shape = (num_rows, hidden.shape[1])
        return _Buffers(
            numerators=hidden.new_empty((num_rows, -(-num_words // 64) * 64))[:, :num_words],
            scaled=hidden.new_empty(shape),
            total=hidden.new_empty(shape, dtype=torch.float32),
            tile_reference=hidden.new_empty(-(-num_words // tile_width) * num_rows, dtype=torch.float32),
            tile_width=tile_width,
        )


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        loss_of_logprobs: LossOfLogprobs,
        path: Path,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.detach().contiguous()
        targets = targets.contiguous()
        bias = None if bias is None else bias.contiguous()
        head = Head(weight=weight.detach().contiguous(), bias=bias, transform=transform)
        gradients = Gradients.empty(hidden, weight, bias, ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        logprobs, entropy = torch.zeros((2, len(hidden)), dtype=torch.float32, device=hidden.device)
        row_size = max(NUMERATOR_BYTES // (hidden.element_size() * len(weight)) // 128 * 128, 128)
        block_list = list(blocks(len(hidden), row_size, multiple=128))
        if block_list:
            buffers = _Buffers.empty(hidden, len(weight), block_list[0].stop, path)
        for place, rows in enumerate(block_list):
            work = Work(mode=kernels.NUMERATORS, hidden=hidden[rows], head=head, targets=targets[rows])
            results, reference = _numerators(work, buffers, path)
            logprobs[rows], entropy[rows] = results.logprobs, results.entropy
            part, grads = _loss_gradients(loss_of_logprobs, results, rows)
            loss += part
            scale = _scale(work, buffers, results, reference, *grads)
            _add_gradients(work, buffers, scale, gradients, rows, adds=place > 0)
        ctx.gradients = (gradients.hidden, gradients.weight, gradients.finished_bias(weight.dtype))
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("token_loss_one_pass frees its gradients in backward, which can run only once")
        for gradient in gradients:
            if gradient is not None:
                _rescale(gradient, grad_loss)
        return *gradients, None, None, None, None


def _rescale(x: Tensor, factor: Tensor) -> None:
    """Multiply x in place by a scalar on its device; the kernel returns at once if the scalar is 1."""
    block = 8192
    grid = (-(-x.numel() // block),)
    if x.numel():
        kernels.hybrid_rl_rescale_kernel[grid](x, factor.float(), x.numel(), BLOCK=block, num_warps=8)


def _numerators(work: Work, buffers: _Buffers, path: Path) -> tuple[RowResults, Tensor]:
    """Fill the numerators of a block, and return the results of its rows and z of the targets [n]."""
    num_rows, num_hidden = work.hidden.shape
    reference = torch.empty(num_rows, dtype=torch.float32, device=work.hidden.device)
    scale, steepness, cap = work.head.scales
    kernels.hybrid_rl_target_kernel[(num_rows,)](
        work.hidden,
        work.head.weight,
        work.head.bias,
        work.targets,
        reference,
        num_hidden=num_hidden,
        scale=scale,
        steepness=steepness,
        cap=cap,
        HAS_BIAS=work.head.bias is not None,
        HAS_CAP=work.head.transform.softcap is not None,
        BLOCK_K=1024,
        num_warps=4,
    )
    num_tiles = len(buffers.tile_reference) // len(buffers.numerators)
    work = replace(
        work,
        row_data=reference[None],
        out=buffers.numerators[:num_rows],
        tile_reference=buffers.tile_reference[: num_tiles * num_rows].view(num_tiles, num_rows),
    )
    return passes.merge(passes.states(work, path), work.targets, work.head), reference


def _loss_gradients(
    loss_of_logprobs: LossOfLogprobs, results: RowResults, rows: slice
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """Return the loss of a block, and its gradients of log-probs and of entropies; None if the loss ignores them."""
    with torch.enable_grad():
        logprobs, entropy = (x.detach().requires_grad_() for x in (results.logprobs, results.entropy))
        loss = loss_of_logprobs(logprobs, entropy, rows).sum()
        grad, grad_entropy = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    # Autograd may return a view, such as one number with stride 0; the kernels need contiguous rows.
    grad = torch.zeros_like(logprobs) if grad is None else grad.contiguous()
    return loss.detach(), (grad, grad_entropy)


def _scale(
    work: Work, buffers: _Buffers, results: RowResults, reference: Tensor, grad: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """Scale the hidden states of a block and finish its numerators; return the scales of the rows [n]."""
    num_rows, num_hidden = work.hidden.shape
    num_columns = len(work.head.weight)
    transform = work.head.transform
    has_cap = transform.softcap is not None
    is_full = grad_entropy is not None or has_cap
    numerators, scale = buffers.numerators[:num_rows], torch.empty_like(grad)
    kernels.hybrid_rl_scale_kernel[(num_rows,)](
        work.hidden,
        buffers.scaled,
        scale,
        numerators,
        numerators.stride(0),
        work.targets,
        results.logprobs,
        results.lse,
        results.top,
        reference,
        grad,
        num_hidden=num_hidden,
        factor=transform.factor,
        IS_FINISHED=is_full,
        BLOCK_K=1024,
        num_warps=4,
    )
    grads = [torch.zeros_like(grad) if g is None else g * transform.factor for g in (grad, grad_entropy)]
    block_rows, block_columns = 16, min(256, buffers.tile_width)
    kernels.hybrid_rl_finish_kernel[(-(-num_rows // block_rows), FINISH_PROGRAMS)](
        numerators,
        numerators.stride(0),
        buffers.tile_reference,
        results.top,
        reference,
        torch.stack([results.lse, results.entropy, *grads]),
        work.targets,
        num_rows=num_rows,
        num_columns=num_columns,
        tile_width=buffers.tile_width,
        cap=work.head.scales[2],
        IS_FULL=is_full,
        HAS_ENTROPY=grad_entropy is not None,
        HAS_CAP=has_cap,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )
    return scale


def _add_gradients(
    work: Work, buffers: _Buffers, scale: Tensor, gradients: Gradients, rows: slice, *, adds: bool
) -> None:
    """Compute the gradients of one block of rows; `adds` adds to the weight's."""
    num_rows = len(work.hidden)
    numerators = buffers.numerators[:num_rows]
    if gradients.hidden is not None:
        total = buffers.total[:num_rows]
        matmul(numerators, work.head.weight, total)
        torch.mul(total, scale[:, None], out=gradients.hidden[rows])
    if gradients.weight is not None:
        matmul(numerators.t(), buffers.scaled[:num_rows], gradients.weight, adds=adds)
    if gradients.bias is not None:
        total = torch.empty((len(gradients.bias), 1), dtype=torch.float32, device=scale.device)
        matmul(numerators.t(), scale[:, None].to(numerators.dtype), total)
        gradients.bias.add_(total[:, 0])
