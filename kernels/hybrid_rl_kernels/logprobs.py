"""Log-probs and entropies of the targets on a GPU, without storing all logits; see reference.fused_logprobs.

Forward is one pass over the logits. Backward is a second pass, which writes the gradients of the logits for all rows
and one slice of the vocabulary at a time. From these, cuBLAS computes the slice of the weight's gradient, which is then
final, and adds to the gradient of the hidden states; no tensor as large as the weight is read repeatedly.

Shape letters: N rows, n rows of one block, H hidden, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rl_kernels import logprob_kernels as kernels
from hybrid_rl_kernels.logit_passes import MIB, Head, Path, Work, blocks, choose_path, matmul, merge, states
from hybrid_rl_kernels.reference import IGNORED_TARGET, LogitTransform, check_head_shapes

# Fastest on an H200, by `profiling/bench_kernels.py --sweep`.
GRADIENT_BYTES = 384 * MIB
"""Memory of the gradients of the logits of one slice."""
HIDDEN_BYTES = 192 * MIB
"""Memory of the float32 gradient of hidden states; more rows run in blocks, each added to weight's gradient."""


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    path: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the targets and entropies; see reference.fused_logprobs.

    Forward allocates at most 64 MiB beyond its results for up to 131,072 rows, backward at most 600 MiB beyond the
    gradients. The weight's gradient is accumulated in float32 over blocks of HIDDEN_BYTES / 4H rows, and rounded to the
    weight's dtype once per block.

    Args:
        path: of the logits; None chooses by device and alignment.
    """
    check_head_shapes(hidden, weight, targets, bias)
    transform = LogitTransform(temperature=temperature, logit_scale=logit_scale, softcap=softcap)
    hidden, targets = hidden.to(weight.dtype).contiguous(), targets.contiguous()
    bias = None if bias is None else bias.contiguous()
    path = path or choose_path(hidden, weight)
    return _FusedLogprobs.apply(hidden, weight, bias, targets, transform, path)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        path: Path,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight=weight.detach(), bias=bias, transform=transform)
        ctx.transform, ctx.path = transform, path
        ctx.set_materialize_grads(False)
        if not len(hidden):
            empty = torch.empty(0, dtype=torch.float32, device=hidden.device)
            ctx.save_for_backward(hidden, weight, bias, targets, empty, empty)
            return empty, empty.clone()
        work = Work(mode=kernels.STATS, hidden=hidden, head=head, targets=targets)
        rows = merge(states(work, path), targets, head)
        ctx.save_for_backward(hidden, weight, bias, targets, rows.lse, rows.entropy)
        return rows.logprobs, rows.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        gradients = Gradients.empty(hidden, weight, bias, ctx.needs_input_grad[:3])
        factor = ctx.transform.factor
        zeros = torch.zeros_like(lse)
        parts = [zeros if g is None else g * factor for g in (grad_logprobs, grad_entropy)]
        row_data = torch.stack([lse, entropy, *parts])
        head = Head(weight=weight.detach(), bias=bias, transform=ctx.transform)
        row_size = max(HIDDEN_BYTES // (4 * hidden.shape[1]), 128)
        for place, rows in enumerate(blocks(len(hidden), row_size, multiple=128)):
            work = Work(
                mode=kernels.GRADIENT,
                hidden=hidden[rows],
                head=head,
                targets=targets[rows],
                row_data=row_data[:, rows].contiguous(),
                has_entropy=grad_entropy is not None,
            )
            _backward_block(work, gradients, rows, ctx.path, adds=place > 0)
        return gradients.hidden, gradients.weight, gradients.finished_bias(weight.dtype), None, None, None


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Tensors of the gradients; None for an input that needs none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    """In float32."""

    @staticmethod
    def empty(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> "Gradients":
        """Return tensors for the gradients; they are 0 if there are no rows."""
        make = torch.empty_like if len(hidden) else torch.zeros_like
        return Gradients(
            hidden=make(hidden) if needs[0] else None,
            weight=make(weight) if needs[1] else None,
            bias=None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=torch.float32),
        )

    def finished_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient of the bias in the dtype of the parameters."""
        return None if self.bias is None else self.bias.to(dtype)


def keep_rows(hidden: Tensor, targets: Tensor, out: Tensor | None) -> Tensor:
    """Return hidden [n, H] with 0 in ignored rows, because 0 * NaN would reach the gradient of the weight."""
    zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
    is_kept = (targets != IGNORED_TARGET)[:, None]
    return torch.where(is_kept, hidden, zero) if out is None else torch.where(is_kept, hidden, zero, out=out)


def _backward_block(work: Work, gradients: Gradients, rows: slice, path: Path, *, adds: bool) -> None:
    """Compute the gradients of one block of rows, a slice of the vocabulary at a time; `adds` adds to weight's."""
    num_rows, num_columns = len(work.hidden), len(work.head.weight)
    size = max(GRADIENT_BYTES // (num_rows * work.hidden.element_size()) // 256 * 256, 256)
    width = -(-min(size, num_columns) // 256) * 256
    buffer = torch.empty((num_rows, width), dtype=work.hidden.dtype, device=work.hidden.device)
    grad_hidden = None if gradients.hidden is None else gradients.hidden[rows]
    # The gradient of hidden is written last, so until then its memory holds the hidden states without ignored rows.
    kept = None if gradients.weight is None else keep_rows(work.hidden, work.targets, grad_hidden)
    total = None if grad_hidden is None else torch.empty_like(grad_hidden, dtype=torch.float32)
    for place, columns in enumerate(blocks(num_columns, size, multiple=256)):
        head, out = work.head.slice(columns.start, columns.stop), buffer[:, : columns.stop - columns.start]
        states(replace(work, head=head, out=out), path)
        if kept is not None and gradients.weight is not None:
            matmul(out.t(), kept, gradients.weight[columns], adds=adds)
        if total is not None:
            matmul(out, head.weight, total, adds=place > 0)
        if gradients.bias is not None:
            gradients.bias[columns] += out.sum(0, dtype=torch.float32)
    if total is not None and grad_hidden is not None:
        grad_hidden.copy_(total)
