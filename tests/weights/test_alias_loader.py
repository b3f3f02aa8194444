"""vLLM's models alias the trainer's buffer: four families, tied or not, with any vocabulary."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rl.weights.bucket import Slot
from hybrid_rl.weights.layout import alias_bytes, alias_slots
from hybrid_rl.weights.routes import Routes

ROOT = Path(__file__).parents[2]
ROWS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
NUM_TENSORS = {"Llama": 20, "Mistral": 20, "Qwen2": 26, "Qwen3": 24}
"""Tensors of each family's model with tied embeddings; test_alias_families.py has the other families."""

# vLLM keeps settings per process and prints much, so its models are built in a separate process.
LOADER = """
import base64, json, pickle, sys
import torch, transformers
from hybrid_rl.weights.checksum import checksum
from hybrid_rl.distributed import free_port, join_world
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.engines.vllm.arguments import LOAD_FORMAT
import hybrid_rl.engines.vllm.worker
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

if not torch.cuda.is_available():
    torch.accelerator.empty_cache = lambda: None  # as in vLLM's worker on a CPU
world, found, is_first = join_world(), {}, True
for family in sys.argv[2:]:
    for tied in (True, False):
        for vocab in (39, 128):
            config = getattr(transformers, family + "Config")(
                vocab_size=vocab, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=tied,
                eos_token_id=0, pad_token_id=0, bos_token_id=1,
            )
            model = getattr(transformers, family + "ForCausalLM")(config)
            folder = f"{sys.argv[1]}/{family}{tied}{vocab}"
            model.save_pretrained(folder)
            alias_buffer = AliasBuffer(dict(model.named_parameters()), world)
            message = base64.b64encode(pickle.dumps(alias_buffer.export())).decode()
            settings = EngineArgs(
                model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, load_format=LOAD_FORMAT,
                model_loader_extra_config={"aliased": message},
            ).create_engine_config()
            with set_current_vllm_config(settings):
                if is_first:
                    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, backend="gloo")
                    initialize_model_parallel(1, 1)
                    is_first = False
                engine = get_model(vllm_config=settings)
            names = [slot.name for slot in alias_buffer.slots]
            with torch.no_grad():  # after the parameters became aliases: nothing is copied from here on
                for i, parameter in enumerate(alias_buffer.ordered()):
                    parameter.view(-1)[-1] += i + 1
            held = engine.hybrid_routes.checksums(names)
            same = [checksum(p) == held[n][0][1] and len(held[n]) == 1 for n, p in zip(names, alias_buffer.ordered())]
            own = [n for n, p in engine.named_parameters() if not alias_buffer.contains(p)]
            found[f"{family} {tied} {vocab}"] = {"same": all(same), "tensors": len(same), "elsewhere": len(own)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Results of the loader for each model."""
    ended = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path_factory.mktemp("models")), *NUM_TENSORS],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [39, 128])  # vLLM pads 39 to 64 rows
@pytest.mark.parametrize("family, num_tensors", NUM_TENSORS.items())
def test_models_of_vllm_alias_the_trainers_buffer(loaded, family, num_tensors, vocab, tied):
    found = loaded[f"{family} {tied} {vocab}"]
    assert found["same"] and found["tensors"] == num_tensors + (not tied)
    assert found["elsewhere"] > 0  # they are in another mapping of the same memory


class Fused(torch.nn.Module):
    """A layer that fuses q, k and v like vLLM's layers: by rows, in that order."""

    num_embeddings_padded = 0

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.qkv_proj = torch.nn.Linear(16, sum(ROWS.values()), bias=False)
        self.transposed = transposed

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            layer = name.split(".")[0]
            first = sum(n for other, n in ROWS.items() if list(ROWS).index(other) < list(ROWS).index(layer))
            rows = self.qkv_proj.weight[first : first + ROWS[layer]]
            rows.copy_(tensor.t() if self.transposed else tensor)


def make_bucket(slots: list[Slot]) -> torch.Tensor:
    return torch.zeros(alias_bytes(slots, num_ranks=1), dtype=torch.uint8)


def record(model: Fused, slots: list[Slot], bucket: torch.Tensor | None = None) -> Routes:
    routes = Routes(model, make_bucket(slots) if bucket is None else bucket)
    for slot in slots:
        routes.record(slot, copies=False)
    return routes


SHAPES = [(f"{name}.weight", (rows, 16), torch.float32) for name, rows in ROWS.items()]


def test_aliases_copy_nothing_and_follow_the_bucket():
    model, slots = Fused(), alias_slots(SHAPES, num_ranks=1)
    before = model.qkv_proj.weight.data.clone()
    bucket = make_bucket(slots)
    routes = record(model, slots, bucket)
    assert torch.equal(model.qkv_proj.weight, before)
    routes.alias()
    slots[1].view(bucket)[3, 4] = 7.0
    assert model.qkv_proj.weight[ROWS["q_proj"] + 3, 4] == 7.0 and model.qkv_proj.weight.count_nonzero() == 1


def test_tensors_in_another_order_cannot_be_aliased():
    slots = alias_slots(SHAPES, num_ranks=1)
    swapped = [
        Slot(name=n, shape=slots[i].shape, dtype=slots[i].dtype, offset=slots[i].offset)
        for i, n in enumerate(["q_proj.weight", "v_proj.weight", "k_proj.weight"])
    ]
    with pytest.raises(
        RuntimeError, match=r"v_proj\.weight does not lie in the trainer as in engine parameter qkv_proj\.w"
    ):
        record(Fused(), swapped).alias()


def test_transposed_tensors_cannot_be_aliased():
    slots = alias_slots([(name, shape[::-1], dtype) for name, shape, dtype in SHAPES], num_ranks=1)
    with pytest.raises(RuntimeError, match=r"q_proj\.weight does not lie in the trainer"):
        record(Fused(transposed=True), slots).alias()


def test_a_missing_tensor_is_named():
    with pytest.raises(RuntimeError, match=r"engine parameter qkv_proj\.weight: 1536 of 2048 elements come"):
        record(Fused(), alias_slots(SHAPES, num_ranks=1)[:2]).alias()


def test_a_parameter_that_was_replaced_fails_the_verification():
    """Checksums read the parameters that the model computes with, not those that were aliased."""
    model = Fused()
    routes = record(model, alias_slots(SHAPES, num_ranks=1))
    routes.alias()
    before = routes.checksums(["k_proj.weight"])
    model.qkv_proj.weight = torch.nn.Parameter(model.qkv_proj.weight + 1, requires_grad=False)
    assert routes.checksums(["k_proj.weight"]) != before
