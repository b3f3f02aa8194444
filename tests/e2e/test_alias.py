"""vLLM engines in both modes of weight sync, alias and copy, next to each other, and what each mode reports."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hybrid_rl import trainer
from hybrid_rl.build import build
from hybrid_rl.config import Config, OptimizerConfig, SyncConfig
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.engines.vllm.sampling import sampling_params
from hybrid_rl.memory.residency import Phase
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.run import Run
from hybrid_rl.steps.logprobs import LogprobGapError
from hybrid_rl.weights.sync import AliasSync, CopySync
from hybrid_rl.weights.verify import SyncError
from tests.e2e.gaps import largest_gap

CPU = torch.device("cpu")
VICTIM = "model.layers.1.mlp.up_proj.weight"
SAMPLED = Sampling(temperature=1.0, max_tokens=12, stop_token_ids=(0,))


@dataclass(kw_only=True)
class Pair:
    """A run after two steps whose engine aliases the weights, and an engine that gets copies of the same weights."""

    run: Run
    copy_engine: VllmEngine
    refusal: str
    """Error of the aliasing engine before the first weight sync."""
    reports: list[Any] = field(default_factory=list)
    copies: CopySync = field(init=False)

    def __post_init__(self) -> None:
        self.copies = self.make_copies(SyncConfig(mode="copy", num_verified=8, bucket_bytes=16 << 10))

    def make_copies(self, config: SyncConfig) -> CopySync:
        self.copy_engine.weights_version = 0
        return CopySync(self.run.actor, self.copy_engine, config, CPU, Timeline())

    def generate(self, engine: VllmEngine) -> list[Generation]:
        """Generate one response at a time, because rounding depends on the batch, and the batch on timing."""
        prompts = [prompt.token_ids for prompt in self.run.data.eval_prompts]
        return [engine.generate([ids], SAMPLED, [row])[0] for row, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def pair(
    make_config: Callable[..., Config], copy_engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    config = make_config(
        tmp_path_factory.mktemp("runs"),
        rollout={"engine": "vllm"},
        update={"zero_stage": 2},
        memory={"swap": "deepspeed"},
        sync={"mode": "alias"},
        checkpoint={"every_steps": 0},
    )
    run = build(config)
    try:
        with pytest.raises(RuntimeError) as refusal:
            run.engine.generate([[5]], SAMPLED, None)
        pair = Pair(run=run, copy_engine=copy_engine, refusal=str(refusal.value))
        sync = run.weight_sync.sync

        def recorded_sync() -> Any:
            pair.reports.append(sync())
            return pair.reports[-1]

        with pytest.MonkeyPatch.context() as patch, run.recorder:
            patch.setattr(run.weight_sync, "sync", recorded_sync)
            trainer.loop(run)
        with run.memory.phase(Phase.ROLLOUT):
            pass
        yield pair
    finally:
        run.close()


@pytest.fixture(params=["alias", "copy"])
def side(request: pytest.FixtureRequest, pair: Pair) -> Iterator[tuple[Any, VllmEngine]]:
    """Weight sync and engine of one mode; afterwards both engines are synchronized and verified again."""
    yield (pair.run.weight_sync, pair.run.engine) if request.param == "alias" else (pair.copies, pair.copy_engine)
    for _ in range(3):  # 20 tensors, 8 at a time
        pair.run.weight_sync.sync()
        pair.copies.sync()


def test_alias_copies_nothing_and_verifies_every_tensor(pair: Pair):
    assert isinstance(pair.run.weight_sync, AliasSync)
    assert [(r.version, r.num_bytes, r.num_verified) for r in pair.reports] == [(1, 0, 20), (2, 0, 8), (3, 0, 8)]


def test_generate_is_refused_before_the_first_weight_sync(pair: Pair):
    assert "the engine's weights were dropped or never filled" in pair.refusal


def test_the_engine_follows_the_trainer_without_copies(pair: Pair, train_step):
    before = pair.generate(pair.run.engine)
    assert largest_gap(pair.run, before) < 1e-4
    train_step(pair.run.actor)
    assert largest_gap(pair.run, before) > 1e-3  # the trainer has moved
    pair.run.weight_sync.sync()
    after = pair.generate(pair.run.engine)
    assert largest_gap(pair.run, after) < 1e-4 and after != before


def test_alias_and_copy_give_the_same_log_probs_bit_for_bit(pair: Pair, train_step):
    for _ in range(3):
        train_step(pair.run.actor)
        pair.run.weight_sync.sync()
        pair.copies.sync()
        aliased, copied = pair.generate(pair.run.engine), pair.generate(pair.copy_engine)
        assert aliased == copied and sum(len(g.logprobs) for g in aliased) > 30


def test_aliased_weights_survive_the_phases_in_which_the_engine_sleeps(pair: Pair):
    """Only the KV cache is released."""
    before = pair.generate(pair.run.engine)
    for _ in range(5):
        for phase in (Phase.SCORE, Phase.UPDATE_ACTOR, Phase.SYNC, Phase.ROLLOUT):
            with pair.run.memory.phase(phase):
                pass
        assert pair.generate(pair.run.engine) == before


def test_a_tensor_that_is_not_finite_is_named(pair: Pair, side: tuple[Any, VllmEngine]):
    victim = pair.run.actor.model.get_parameter(VICTIM)
    held = float(victim.data[3, 4])
    victim.data[3, 4] = float("nan")
    try:
        with pytest.raises(SyncError, match=re.escape(f"trainer tensor {VICTIM} holds NaN or infinity")):
            for _ in range(3):
                side[0].sync()
    finally:
        victim.data[3, 4] = held


def test_a_stale_tensor_is_named(pair: Pair, side: tuple[Any, VllmEngine], monkeypatch: pytest.MonkeyPatch):
    """Copy: one tensor goes elsewhere. Alias: the trainer's tensor is moved, and the check of moved tensors is off."""
    sync, victim = side[0], pair.run.actor.model.get_parameter(VICTIM)
    aliased = victim.data
    if isinstance(sync, AliasSync):
        monkeypatch.setattr(sync.alias_buffer, "moved", list)
        victim.data = aliased * 1.01
    else:
        victim.data.mul_(1.01)
        (filling,) = [each for each in sync.fills if VICTIM in each.names]
        elsewhere = [v.clone() if n == VICTIM else v for n, v in zip(filling.names, filling.views, strict=True)]
        monkeypatch.setattr(filling, "views", elsewhere)
    with pytest.raises(SyncError, match=re.escape(f"tensor {VICTIM} differs between trainer and engine worker 0")):
        for _ in range(3):
            sync.sync()
    victim.data = aliased


def test_a_weight_that_leaves_the_alias_buffer_is_named_at_once(pair: Pair):
    victim = pair.run.actor.model.get_parameter(VICTIM)
    aliased = victim.data
    victim.data = aliased.clone()
    with pytest.raises(SyncError, match=re.escape(f"trainer tensor {VICTIM} has left the buffer")):
        pair.run.weight_sync.sync()
    victim.data = aliased


def test_a_tensor_that_is_not_sent_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    shapes = [shape for shape in pair.run.actor.named_shapes() if shape[0] != VICTIM]
    with monkeypatch.context() as patch:
        patch.setattr(pair.run.actor, "named_shapes", lambda: shapes)
        copies = pair.make_copies(SyncConfig(mode="copy"))
    rule = r"engine parameter model\.layers\.1\.mlp\.gate_up_proj\.weight: 2048 of 4096 elements come from the trainer"
    with pytest.raises(Exception, match=rule):
        copies.sync()
    pair.copies = pair.make_copies(SyncConfig(mode="copy"))
    pair.copies.sync()
    assert pair.generate(pair.copy_engine) == pair.generate(pair.run.engine)


def test_a_tensor_that_the_engine_does_not_have_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    shapes = [("model.extra.weight", (3,), torch.float32)]
    with monkeypatch.context() as patch:
        patch.setattr(pair.run.actor, "named_shapes", lambda: shapes)
        copies = pair.make_copies(SyncConfig(mode="copy"))
    pair.copy_engine.load_bucket(0)  # starts the copy, whose error the next call raises
    with pytest.raises(Exception, match=r"model\.extra\.weight"):
        pair.copy_engine.finish_sync()
    assert copies is not None
    pair.copies = pair.make_copies(SyncConfig(mode="copy"))
    pair.copies.sync()


def test_a_prefix_cache_that_is_not_dropped_is_an_error(
    pair: Pair, side: tuple[Any, VllmEngine], monkeypatch: pytest.MonkeyPatch
):
    """vLLM does not drop the cache while a request runs."""
    sync, engine = side
    parameters = sampling_params(Sampling(temperature=0, max_tokens=40, stop_token_ids=()), None, num_requests=1)
    for number in range(100):  # the engine runs 16 at a time, which takes much longer than a weight sync
        engine.llm.llm_engine.add_request(f"running {number}", {"prompt_token_ids": [5]}, parameters)
    with pytest.raises(RuntimeError, match="keeps its prefix cache of older weights: requests are still running"):
        sync.sync()
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
    sync.sync()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_responses_sent_whole_equal_those_sent_token_by_token(pair: Pair, temperature: float):
    """With stop strings, which this process looks for, vLLM sends every token at once; see WholeResponses."""
    pair.copies.sync()
    tokenizer, prompts = pair.run.data.tokenizer, [p.token_ids for p in pair.run.data.eval_prompts] * 4
    free = Sampling(temperature=temperature, max_tokens=12, stop_token_ids=())
    whole = pair.copy_engine.generate(prompts, free, list(range(len(prompts))))
    assert all(len(g.token_ids) == 12 and len(g.logprobs) == (12 if temperature else 0) for g in whole)
    strings = (tokenizer.decode(whole[0].token_ids[3:5]), "no token has this text")
    for stop_strings in (strings, strings[1:]):
        sampling = dataclasses.replace(free, stop_strings=stop_strings)
        streamed = pair.copy_engine.generate(prompts, sampling, list(range(len(prompts))))
        for one, other in zip(streamed, whole, strict=True):
            length = len(one.token_ids)
            assert one.token_ids == other.token_ids[:length]
            assert one.logprobs == pytest.approx(other.logprobs[:length], rel=0, abs=1e-5)  # batches differ
        assert any(len(g.token_ids) < 12 for g in streamed) == (len(stop_strings) == 2)


def test_prompts_are_not_chunked_on_a_cpu(pair: Pair):
    """vLLM on a CPU fails when it has to undo what a seeded request drew at the end of a chunk."""
    assert not pair.copy_engine.llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill


def test_an_engine_that_dropped_its_copies_refuses_to_generate(pair: Pair):
    pair.copy_engine.unmap("weights")
    with pytest.raises(RuntimeError, match="the engine's weights were dropped or never filled"):
        pair.generate(pair.copy_engine)
    pair.copy_engine.map("weights")
    with pytest.raises(RuntimeError, match="the engine's weights were dropped or never filled"):
        pair.generate(pair.copy_engine)
    pair.copies.sync()
    assert pair.generate(pair.copy_engine) == pair.generate(pair.run.engine)


@pytest.mark.parametrize("old_logprobs", ["trainer", "rollout"])
def test_an_engine_that_keeps_old_weights_stops_the_run(
    make_config: Callable[..., Config], train_here: Callable[[Config], Any], tmp_path, monkeypatch, old_logprobs: str
):
    """The check of log-probs is independent of checksums, which are off here, and of update.old_logprobs."""
    settings = {
        "update": {"old_logprobs": old_logprobs, "actor": OptimizerConfig(lr=0.05)},
        "sync": {"mode": "copy", "num_verified": 0},
    }
    rows = train_here(make_config(tmp_path / "good", **settings)).metrics
    assert len(rows) == 2 and all(row["rollout/logprob_gap"] < 1e-5 for row in rows)
    load_bucket = HuggingFaceEngine.load_bucket

    def load_only_once(self: HuggingFaceEngine, index: int) -> None:
        if self.weights_version == 0:
            load_bucket(self, index)

    monkeypatch.setattr(HuggingFaceEngine, "load_bucket", load_only_once)
    with pytest.raises(LogprobGapError, match="the engine does not run the trainer's weights"):
        train_here(make_config(tmp_path / "bad", **settings))
