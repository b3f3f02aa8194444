"""GRPO of a 7B model with LoRA on a card of 24 GB: a ballast process holds the rest of a larger card.

python profiling/lora_24gb.py runs/lora_24gb          # writes 15 GB of random weights first, about three minutes in all
python profiling/lora_24gb.py runs/lora_24gb --steps 3 --model models/random_7b    # keeps the weights for the next time

The run has only the memory that the ballast leaves, so that engine, contexts and fragmentation count. The last lines
are metrics of each step, and the peak of the card without the ballast. Exit code 1: the run has failed.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import yaml
from random_model import write_model

HERE = Path(__file__).parent
GIB = 1 << 30
CARD_BYTES = 24_564 << 20
"""Memory of a card that is sold as 24 GB."""
BALLAST = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = []
while free - (1 << 28) > int(sys.argv[1]):
    held.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
    free, _ = torch.cuda.mem_get_info()
print(free, flush=True)
sys.stdin.read()
"""


def settings(folder: Path, model: Path, *, steps: int) -> dict[str, object]:
    """Return the settings of the run; the size of the KV cache is fixed, because the plan sees the larger card."""
    return {
        "run": {"name": "run", "dir": str(folder), "num_steps": steps, "eval_every_steps": 0},
        "models": {
            "actor": str(model / "policy"),
            "gradient_checkpointing": True,
            "lora": {"rank": 16, "alpha": 32.0, "sync": "adapters"},
        },
        "prompts": {"path": str(model / "prompts_128.jsonl"), "max_prompt_tokens": 128, "answer_column": None},
        "rollout": {
            "rollout_batch_size": 8,
            "group_size": 4,
            "max_response_tokens": 128,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": GIB,
            "gpu_memory_utilization": 0.14,
            "enforce_eager": True,
        },
        "reward": {"functions": [f"{HERE}/even_words.py:even_words"]},
        "advantage": {"estimator": "grpo", "kl_coef": 0.01},
        "update": {"mini_batch_size": 32, "micro_batch_tokens": 2048, "actor": {"lr": 1.0e-5}},
        "memory": {"swap": "off"},
        "checkpoint": {"every_steps": 0, "export": False},
    }


def watch(peak: list[int], ended: threading.Event, used_before: int) -> None:
    """Keep the largest number of bytes that the card holds besides the ballast."""
    while not ended.wait(0.05):
        free, total = torch.cuda.mem_get_info()
        peak[0] = max(peak[0], total - free - used_before)


def main() -> None:
    """Parse the command line, hold the ballast, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="folder of the random weights; default: inside the run's folder")
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    model = arguments.model or arguments.folder / "model"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    write_model(model, arguments.shape, 128, has_reward=False)
    torch.cuda.empty_cache()
    print(f"weights written: {time.monotonic() - began:.0f} s", flush=True)
    path = arguments.folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings(arguments.folder, model, steps=arguments.steps)))
    command = [sys.executable, "-c", BALLAST, str(CARD_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ballast:
        assert ballast.stdin and ballast.stdout
        left = int(ballast.stdout.readline())
        _, total = torch.cuda.mem_get_info()
        print(f"the ballast leaves {left / GIB:.2f} GiB of {total / GIB:.1f}", flush=True)
        peak, ended = [0], threading.Event()
        threading.Thread(target=watch, args=(peak, ended, total - left), daemon=True).start()
        run = subprocess.run([sys.executable, str(HERE.parent / "launch/colocated.py"), "--config", str(path)])
        ended.set()
        ballast.stdin.close()
    result = {
        "rc": run.returncode,
        "left_gib": left / GIB,
        "peak_gib": peak[0] / GIB,
        "seconds": time.monotonic() - began,
    }
    metrics = arguments.folder / "run" / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        row = json.loads(line)
        kept = ("time/", "sync/", "rollout/logprob_gap", "memory/")
        print({name: value for name, value in row.items() if name.startswith(kept)})
    print(result)
    (arguments.folder / "result.json").write_text(json.dumps(result) + "\n")
    sys.exit(min(run.returncode, 1))


if __name__ == "__main__":
    main()
