"""Program: for each family, vLLM with a base that it aliases and adapters from memory, on tiny random models.

Arguments: a folder, the device, names of families. The last line of the output is JSON: for each family what `serve`
returns.
"""

import json
import pickle
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.config import LoraConfig, ModelsConfig, SyncConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines.vllm.adapters import adapter_request
from hybrid_rl.engines.vllm.sampling import sampling_params, to_generation
from hybrid_rl.models.loading import choose_dtype, load_actor
from hybrid_rl.models.lora import adapter_factors, adapter_settings, base_parameters
from hybrid_rl.models.packed import Actor
from hybrid_rl.weights.adapter_sync import plan_adapters
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes
from hybrid_rl.weights.checksum import checksum
from tests.weights.alias_families import FAMILIES, PROMPTS, SAMPLED, engine, save_random

RANK = 3  # vLLM pads it to 8


def load_with_adapters(folder: Path, device: torch.device) -> tuple[Actor, LoraConfig]:
    """Return an actor whose adapters, on every linear layer, are random and the same in every process."""
    lora = LoraConfig(rank=RANK, alpha=6.0)
    actor = load_actor(str(folder), ModelsConfig(), device, lora=lora)
    generator = torch.Generator().manual_seed(5)
    for factor in adapter_factors(actor.model).values():
        factor.base.data.copy_(torch.randn(factor.base.shape, generator=generator) * 0.2)
    return actor, lora


def send(llm: Any, tensors: Mapping[str, Tensor], device: torch.device) -> list[dict[str, Any]]:
    """Send the matrices as a weight sync does, and return what vLLM's workers hold."""
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    _, slots = plan_adapters([], shapes, SyncConfig())
    bucket = IpcBucket(bucket_bytes([slots]), device)
    for slot in slots:
        slot.view(bucket.tensor).copy_(tensors[slot.name])
    with tempfile.TemporaryDirectory() as place, Listener(f"{place}/pipe", "AF_UNIX") as listener:
        message = pickle.dumps((bucket.handle(), [slots], listener.address))
        llm.collective_rpc("hybrid_open_bucket", args=(message,))
        with listener.accept() as pipe:
            pipe.send_bytes((0).to_bytes(4, "little"))
            pipe.send_bytes(b"")
            llm.collective_rpc("hybrid_load_buckets")
    return [pickle.loads(m) for m in llm.collective_rpc("hybrid_checksums", args=(pickle.dumps(list(tensors)),))]


def serve(folder: Path, device: torch.device) -> dict[str, Any]:
    """Return responses of vLLM with adapters, whether it holds every matrix as it is, and whether its base changed."""
    actor, lora = load_with_adapters(folder, device)
    dtype = choose_dtype("auto", device)
    buffer = AliasBuffer(base_parameters(actor.model), join_world())
    before = [checksum(parameter) for parameter in buffer.ordered()]
    adapters = replace(lora, target_modules=adapter_settings(actor.model)["target_modules"])
    with engine(folder, dtype, buffer.export(), adapters) as llm:
        tensors = {name: factor.compute() for name, factor in adapter_factors(actor.model).items()}
        (held,) = send(llm, tensors, device)
        same = []
        for name, tensor in tensors.items():
            flat = tensor.contiguous().flatten()
            same += [checksum(flat.as_strided(*part)) == total for part, total in held[name]]
        parameters = [sampling_params(SAMPLED, row, num_requests=len(PROMPTS)) for row in range(len(PROMPTS))]
        requests = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(requests, parameters, use_tqdm=False, lora_request=adapter_request())
        llm.collective_rpc("hybrid_close_bucket")
    responses = [to_generation(output, SAMPLED) for output in outputs]
    return {
        "num_matrices": len(tensors),
        "same": all(same) and len(same) >= len(tensors),
        "is_base_unchanged": before == [checksum(parameter) for parameter in buffer.ordered()],
        "responses": [{"token_ids": r.token_ids, "logprobs": r.logprobs} for r in responses],
    }


def main() -> None:
    folder, device, names = Path(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3:]
    found = {}
    for name in names:
        save_random(FAMILIES[name](), folder / name, choose_dtype("auto", device))
        found[name] = serve(folder / name, device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
