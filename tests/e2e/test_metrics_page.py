"""docs/metrics.md explains every name of a real row of metrics.jsonl."""

import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def explained(page: str) -> list[re.Pattern[str]]:
    """Return a pattern for each name in the first column of the page's tables; <...> stands for any word."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [
        re.compile(re.sub(r"<\w+>", r"\\w+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))) for name in names
    ]


def test_every_logged_name_is_explained(make_config, train_here, tmp_path):
    config = make_config(
        tmp_path,
        run={"eval_samples": 2},
        models={"ema_decay": 0.9},
        rollout={"dynamic_filtering_reward_range": (-100.0, 100.0)},
        advantage={"kl_in": "loss"},
        update={"correction": "tis"},
    )
    train_here(config)
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {name for row in rows for name in row} - {"step"}
    patterns = explained(PAGE.read_text())
    assert [name for name in sorted(logged) if not any(pattern.fullmatch(name) for pattern in patterns)] == []
    assert {"accuracy", "filter/groups", "correction/out", "actor/kl_loss", "critic/value"} <= logged
    phases = ("rollout", "score", "update_critic", "update_actor")
    assert {f"tokens_per_s/{phase}" for phase in phases} <= logged and not any(name[:4] == "mfu/" for name in logged)
    assert all(rows[0][f"tokens_per_s/{phase}"] > 0 for phase in phases)
