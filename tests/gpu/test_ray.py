"""Ray Train's workers on one GPU (`pytest -m gpu -s tests/gpu/test_ray.py`) and on two (`-m multi_gpu`)."""

import pytest
import torch


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(
            1, marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]
        ),
        pytest.param(
            2, marks=[pytest.mark.multi_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two")]
        ),
    ],
)
def test_ray_trains_the_same_as_the_launcher(train, num_ranks):
    pytest.importorskip("ray.train")
    launched, by_ray = (
        train(f"ray_{ray}", num_ranks=num_ranks, by_ray=ray, sync={"mode": "auto"}) for ray in (False, True)
    )
    launched.assert_same_first_step(by_ray)
    assert len(by_ray.rows) == len(launched.rows) == 3
