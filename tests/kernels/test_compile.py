"""Every kernel compiles for Hopper, which needs no GPU: the interpreter accepts much that the compiler refuses."""

from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybrid_rl_kernels import gae_kernels, logit_passes
from hybrid_rl_kernels import logprob_kernels as kernels

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
F, IDS, B, INT, FLOAT = "*fp32", "*i64", "*bf16", "i32", "fp32"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, arguments: dict[str, Any], **options: int) -> Any:
    """Return a kernel compiled for arguments, each a type, or a value that is fixed."""
    types = {F, IDS, B, INT, FLOAT, "*i1", "*i32", "*fp64"}
    is_type = {n: isinstance(v, str) and (v in types or v.startswith("tensordesc")) for n, v in arguments.items()}
    signature = {n: arguments[n] if is_type[n] else "constexpr" for n in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): v for n, v in arguments.items() if not is_type[n]}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    result = triton.compile(source, target=HOPPER, options=options)
    assert result.metadata.shared <= SHARED_BYTES
    assert "cubin" in result.asm
    return result


def modes(mode: int, has_entropy: bool, has_bias: bool, has_cap: bool) -> dict[str, Any]:
    return {
        **dict.fromkeys(("scale", "steepness", "cap"), FLOAT),
        "MODE": mode,
        "HAS_ENTROPY": has_entropy,
        "HAS_BIAS": has_bias,
        "HAS_CAP": has_cap,
        "bias_ptr": B if has_bias else None,
        "row_ptr": None if mode == kernels.STATS else F,
        "tile_reference_ptr": F if mode == kernels.NUMERATORS else None,
        "state_ptr": F,
        "targets_ptr": IDS,
    }


MODES = [(kernels.STATS, False), (kernels.NUMERATORS, False), (kernels.GRADIENT, False), (kernels.GRADIENT, True)]


@pytest.mark.parametrize("has_bias, has_cap", [(False, False), (True, True)])
@pytest.mark.parametrize("mode, has_entropy", MODES)
def test_vocab_kernel_multiplies_on_tensor_cores(mode, has_entropy, has_bias, has_cap):
    tiles = logit_passes.tiles_of(mode)
    ints = ("num_rows", "num_columns", "num_hidden", "first_column", "tiles_per_split", "num_splits")
    out = None if mode == kernels.STATS else f"tensordesc<bf16[{tiles.rows}, {tiles.columns}]>"
    arguments = {
        "hidden": f"tensordesc<bf16[{tiles.rows}, {tiles.k}]>",
        "weight": f"tensordesc<bf16[{tiles.columns}, {tiles.k}]>",
        "out": out,
        **dict.fromkeys(ints, INT),
        **modes(mode, has_entropy, has_bias, has_cap),
        "PRECISION": "tf32",
        "GROUP": tiles.group,
        "FLATTEN": tiles.is_flat,
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_COLUMNS": tiles.columns,
        "BLOCK_K": tiles.k,
    }
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    result = compiled(kernels.hybrid_rl_vocab_kernel, arguments, **options)
    assert "wgmma.mma_async" in result.asm["ptx"] and "cp.async.bulk.tensor" in result.asm["ptx"]


@pytest.mark.parametrize("mode, has_entropy", MODES)
def test_row_kernel(mode, has_entropy):
    ints = ("num_rows", "stride", "num_columns", "logits_stride", "out_stride", "first_column")
    block = dict(zip(("BLOCK_ROWS", "BLOCK_COLUMNS"), logit_passes.ROW_TILE, strict=True))
    out = None if mode == kernels.STATS else B
    arguments = {"logits_ptr": F, "out_ptr": out, **dict.fromkeys(ints, INT), **block}
    compiled(kernels.hybrid_rl_row_kernel, arguments | modes(mode, has_entropy, True, True), num_warps=4)


def test_kernels_of_rows():
    floats = dict.fromkeys(("state_ptr", "logprobs_ptr", "entropy_ptr", "lse_ptr", "top_ptr"), F)
    ints = {"num_rows": INT, "num_splits": INT, "scale": FLOAT}
    compiled(kernels.hybrid_rl_merge_kernel, {**floats, "targets_ptr": IDS, **ints, "BLOCK_ROWS": 128})
    floats = dict.fromkeys(("scale", "steepness", "cap"), FLOAT)
    rows = {"hidden_ptr": B, "targets_ptr": IDS, "num_hidden": INT, "BLOCK_K": 1024}
    arguments = {**rows, **floats, "weight_ptr": B, "bias_ptr": B, "z_ptr": F, "HAS_BIAS": True, "HAS_CAP": True}
    compiled(kernels.hybrid_rl_target_kernel, arguments)
    floats = dict.fromkeys(("scale_ptr", "logprobs_ptr", "lse_ptr", "top_ptr", "reference_ptr", "grad_ptr"), F)
    arguments = {**rows, **floats, "scaled_ptr": B, "numerators_ptr": B, "stride": INT, "factor": FLOAT}
    compiled(kernels.hybrid_rl_scale_kernel, {**arguments, "IS_FINISHED": False})


def test_rescale_kernel():
    compiled(kernels.hybrid_rl_rescale_kernel, {"x_ptr": B, "factor_ptr": F, "num_elements": INT, "BLOCK": 8192})


@pytest.mark.parametrize("is_full", [False, True])
def test_finish_kernel(is_full):
    floats = dict.fromkeys(("tile_reference_ptr", "top_ptr", "reference_ptr", "row_ptr"), F)
    ints = dict.fromkeys(("stride", "num_rows", "num_columns", "tile_width"), INT)
    flags = {"IS_FULL": is_full, "HAS_ENTROPY": is_full, "HAS_CAP": is_full, "BLOCK_ROWS": 16, "BLOCK_COLUMNS": 256}
    arguments = {"numerators_ptr": B, "targets_ptr": IDS, "cap": FLOAT, **floats, **ints, **flags}
    compiled(kernels.hybrid_rl_finish_kernel, arguments, num_warps=4)


@pytest.mark.parametrize("is_packed, has_all", [(False, False), (True, True)])
def test_gae_kernels(is_packed, has_all):
    optional = ("returns_ptr", "moments_ptr", "bootstrap_ptr", "scores_ptr", "kl_ptr", "decay_ptr")
    arguments = {
        **dict.fromkeys(("advantages_ptr", "rewards_ptr", "values_ptr"), F),
        **dict.fromkeys(optional, F if has_all else None),
        **dict.fromkeys(("gamma", "decay", "kl_coef", "turn_gamma"), FLOAT),
        "mask_ptr": "*i1",
        "turn_ends_ptr": "*i1" if has_all else None,
        "ends_ptr": "*i32" if is_packed else None,
        "row_length": INT,
        "BLOCK": gae_kernels.MAX_BLOCK,
    }
    compiled(gae_kernels.hybrid_rl_gae_kernel, arguments, num_warps=8)


def test_gae_exchanges_one_map_per_thread_between_lanes():
    pointers = ("advantages_ptr", "returns_ptr", "moments_ptr", "rewards_ptr", "values_ptr")
    absent = ("bootstrap_ptr", "scores_ptr", "kl_ptr", "turn_ends_ptr", "decay_ptr", "ends_ptr")
    arguments = {
        **dict.fromkeys(pointers, F),
        **dict.fromkeys(absent, None),
        **dict.fromkeys(("gamma", "decay", "kl_coef", "turn_gamma"), FLOAT),
        "mask_ptr": "*i1",
        "row_length": INT,
        "BLOCK": 2048,
    }
    ptx = compiled(gae_kernels.hybrid_rl_gae_kernel, arguments, num_warps=8).asm["ptx"]
    # 64, moments included, for the eight tokens of a thread: 44 for the maps and 20 for the value of the next sampled
    # token; one scan over all tokens had 76 for the maps alone (Triton 3.9.0).
    assert ptx.count("shfl.sync") <= 64


def test_moment_kernels():
    merge = {"moments_ptr": F, "merged_ptr": "*fp64", "num_parts": INT, "BLOCK": 1024}
    compiled(gae_kernels.hybrid_rl_moments_kernel, merge, num_warps=16)
    whiten = {"x_ptr": F, "mask_ptr": "*i1", "moments_ptr": "*fp64", "out_ptr": F, "num_elements": INT, "bound": FLOAT}
    compiled(gae_kernels.hybrid_rl_whiten_kernel, {**whiten, "BLOCK": 2048}, num_warps=8)
