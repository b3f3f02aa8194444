"""vLLM with adapters beside the base: aliased and copied, its log-probs, its checksums and what a run reports."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl import trainer
from hybrid_rl.batch import Rollout
from hybrid_rl.build import build
from hybrid_rl.config import Config, LoraConfig
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.memory.residency import Phase
from hybrid_rl.run import Run
from hybrid_rl.weights.adapter_sync import AdapterSync
from hybrid_rl.weights.verify import SyncError
from tests.e2e.gaps import largest_gap

pytestmark = pytest.mark.slow

SAMPLED = Sampling(temperature=1.0, max_tokens=12, stop_token_ids=(0,))
NUM_BASE = 20
ALL_LINEARS, SOME = 2 * 7 * 2, 2 * 2 * 2
"""Matrices of adapters on all seven linear layers of two blocks, and on two of them."""


@dataclass(kw_only=True)
class Live:
    """A run after two steps; vLLM's log-probs come from requests one by one, because rounding depends on the batch."""

    run: Run
    is_aliased: bool
    num_matrices: int
    base: dict[str, torch.Tensor]
    """The base before the first step."""
    reports: list[Any] = field(default_factory=list)

    def generate(self) -> list[Generation]:
        prompts = [prompt.token_ids for prompt in self.run.data.eval_prompts]
        return [self.run.engine.generate([ids], SAMPLED, [row])[0] for row, ids in enumerate(prompts)]


def read_base(run: Run) -> dict[str, torch.Tensor]:
    with run.actor.base.gathered([name for name, _, _ in run.actor.base.named_shapes()]) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


CASES = {
    "aliased": (LoraConfig(rank=3, alpha=6.0), 2, ALL_LINEARS),
    "copied": (LoraConfig(rank=8, alpha=24.0, target_modules=["v_proj", "down_proj"], sync="adapters"), 3, SOME),
}
"""Settings of the adapters, ZeRO stage and number of matrices."""


@pytest.fixture(scope="module", params=list(CASES))
def live(
    request: pytest.FixtureRequest, make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    lora, stage, num_matrices = CASES[request.param]
    config = make_config(tmp_path_factory.mktemp("runs"), rollout={"engine": "vllm"}, update={"zero_stage": stage})
    models = config.models
    run = build(replace(config, models=replace(models, critic=models.actor, lora=lora)))
    live = Live(run=run, is_aliased=request.param == "aliased", num_matrices=num_matrices, base=read_base(run))
    sync = run.weight_sync.sync

    def recorded_sync() -> Any:
        live.reports.append(sync())
        return live.reports[-1]

    try:
        with pytest.MonkeyPatch.context() as patch, run.recorder:
            patch.setattr(run.weight_sync, "sync", recorded_sync)
            trainer.loop(run)
        with run.memory.phase(Phase.SYNC):
            run.weight_sync.sync()
        with run.memory.phase(Phase.ROLLOUT):
            pass
        yield live
    finally:
        run.close()


def test_each_sync_sends_the_adapters_and_verifies_them_and_the_base(live: Live):
    assert isinstance(live.run.weight_sync, AdapterSync)
    adapters = sum(4 * torch.Size(shape).numel() for _, shape, _ in live.run.actor.adapters.named_shapes())
    base = 0 if live.is_aliased else sum(tensor.nbytes for tensor in live.base.values())
    assert [report.num_bytes for report in live.reports] == [adapters + base, adapters, adapters]
    assert [report.num_verified for report in live.reports] == [NUM_BASE + live.num_matrices, 16, 16]


def test_engine_and_trainer_agree_to_float32_rounding_after_steps(live: Live):
    generations = live.generate()
    assert largest_gap(live.run, generations) < 2e-5
    with torch.no_grad():
        for parameter in live.run.actor.module.parameters():
            if parameter.requires_grad and live.is_aliased:
                parameter.add_(0.05)
    if live.is_aliased:  # the engine has older adapters than the trainer
        assert largest_gap(live.run, live.generate()) > 1e-3
        live.run.weight_sync.sync()
        assert largest_gap(live.run, live.generate()) < 2e-5


def test_the_base_is_what_it_was_before_the_first_step(live: Live):
    after = read_base(live.run)
    assert len(after) == NUM_BASE
    assert all(torch.equal(tensor, after[name]) for name, tensor in live.base.items())


def test_a_damaged_adapter_in_the_engine_is_named(live: Live, monkeypatch: pytest.MonkeyPatch):
    sync = live.run.weight_sync
    assert isinstance(sync, AdapterSync)
    filling = sync._adapters
    place = next(place for place, name in enumerate(filling.names) if name.endswith("v_proj.lora_B.weight"))
    load_bucket = live.run.engine.load_bucket

    def damage(index: int) -> None:
        if index == len(sync._plan) - 1:
            filling.views[place].view(torch.int32)[1, 2] ^= 1
        load_bucket(index)

    monkeypatch.setattr(live.run.engine, "load_bucket", damage)
    with pytest.raises(SyncError, match=re.escape(f"tensor {filling.names[place]} differs")):
        for _ in range(4):  # 8 matrices at a time
            sync.sync()
    monkeypatch.undo()
    for _ in range(4):
        sync.sync()


def test_the_first_lines_say_what_the_engine_gets(live: Live):
    (line,) = re.findall(r"rollout engine: vLLM, .*", (live.run.config.run_dir / "log.txt").read_text())
    base = "shared base" if live.is_aliased else "copies of the trainer's base (update.zero_stage = 3"
    assert f"adapters, {base}" in line


def test_a_critic_that_starts_from_the_actor_has_its_base(live: Live):
    """Both bases are frozen; with ZeRO-3 each is in shards of its own."""
    line = f"critic: {NUM_BASE} of its {NUM_BASE} frozen tensors are the actor's"
    assert (line in (live.run.config.run_dir / "log.txt").read_text()) == live.is_aliased
    assert live.run.critic is not None
    places = [
        {p.untyped_storage().data_ptr() for p in engine.model.parameters() if not p.requires_grad}
        for engine in (live.run.actor, live.run.critic)
    ]
    assert (places[0] == places[1]) == live.is_aliased


def test_conversations_use_the_adapter(live: Live, tmp_path: Path):
    def run_stream(stream: Any, starts: Any) -> list[Rollout]:
        from hybrid_rl.engines import Request

        stream.submit([Request(number=0, token_ids=[5, 9, 3], max_tokens=12, seed=7)])
        found: list[Any] = []
        while not found:
            found = stream.receive()
        streamed.append(found[0][1])
        return []

    streamed: list[Generation] = []
    (expected,) = live.run.engine.generate([[5, 9, 3]], SAMPLED, [7])
    live.run.engine.converse([], SAMPLED, run_stream)
    assert streamed[0].token_ids == expected.token_ids
