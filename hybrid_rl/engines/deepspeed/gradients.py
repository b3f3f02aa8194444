"""Gradients of an optimizer step in the engine of the deepspeed package: their reduction, and their removal.

DeepSpeed reduces gradients in its backward: under ZeRO 0 and 1 at the end of the last one, under ZeRO 2 and 3 while
each one runs. Here ZeRO 0 and 1 reduce in the optimizer step instead, so that until then no rank waits for another.
"""

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

INITIAL_MICRO_STEP = -1  # of ZeRO 1 and 2; ZeRO-3 starts with 0


def delay_reduction(engine: Any, *, zero_stage: int) -> None:
    """Make backward only accumulate gradients under ZeRO 0 and 1."""
    engine.enable_backward_allreduce = zero_stage > 1


def reduce_delayed(engine: Any) -> None:
    """Reduce the gradients that backward has accumulated under ZeRO 0 and 1."""
    if not engine.enable_backward_allreduce:
        engine.allreduce_gradients()


def drop_gradients(engine: Any, *, zero_stage: int) -> None:
    """Bring the engine to its state before the first forward of an optimizer step; no collective.

    A forward or backward may have ended early with an exception.
    """
    zero = engine.optimizer
    if not isinstance(zero, ZeROOptimizer):
        engine.zero_grad()
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # another stream may still reduce what is dropped
    zero._remaining_grad_acc_hooks = 0
    zero._backward_active_depth = 0
    zero._backward_hook_state.reset_for_new_step()
    if zero_stage == 3:
        _drop_sharded(zero)
        release_weights(engine)
    elif isinstance(zero, BF16_Optimizer):
        zero.zero_grad()
    else:
        _drop_partitioned(zero)


def _drop_partitioned(zero: Any) -> None:
    """Drop the gradients of ZeRO 1 and 2: of the parameters, in the reduction buckets, and in this rank's sums."""
    zero.zero_grad()
    for bucket in zero.ipg_buckets.values():
        bucket.clear()
    zero._release_ipg_buffers()
    zero.extra_large_param_to_reduce.clear()
    zero.previous_reduced_grads.clear()
    zero.params_already_reduced = [False] * len(zero.params_already_reduced)
    for sums in (zero.averaged_gradients, zero.all_grad_tensors):
        sums.update(dict.fromkeys(sums))  # DeepSpeed's parameters refer to the dictionaries
    zero.micro_step_id = INITIAL_MICRO_STEP
    if zero.cpu_offload:
        zero._offload_accumulated_param_ids = set()
        zero.reset_cpu_buffers()


def _drop_sharded(zero: Any) -> None:
    """Drop the gradients of ZeRO-3; the first backward overwrites this rank's sums."""
    for bucket in zero.ipg_buckets.values():
        bucket.clear_params()
    zero.params_already_reduced.update(dict.fromkeys(zero.params_already_reduced, False))
    zero.averaged_gradients = {}
    zero._offload_boundary_param_ids = set()
    if zero.offload_optimizer:
        zero.reset_cpu_buffers()
    for parameters in zero.fp16_groups:
        for parameter in parameters:
            parameter.grad = None  # DeepSpeed's zero_grad fails on a CPU where a gradient exists
    zero.zero_grad()


def release_weights(engine: Any) -> None:
    """Free the weights that ZeRO-3 has gathered, for layers whose forward or backward ended early too.

    DeepSpeed predicts which weights a forward needs from the layers that ran before, so that record starts again.
    """
    offload = engine.optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    offload.release_backward_leftovers()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    offload.empty_partition_cache()
    for module in engine.module.modules():
        if "applied_pre_backward_ref_cnt" in vars(module):
            module.applied_pre_backward_ref_cnt = 0
