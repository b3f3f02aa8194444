"""Draw docs/images/residency.svg from the residency table: python docs/draw_residency.py.

A filled cell says that a tenant is on the GPU in a phase, its colour what a release does with the contents.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.svg import ENGINE, FAINT, FROZEN, TRAINER, picture, text
from hybrid_rl.memory.residency import RESIDENCY, Phase

PICTURE = Path(__file__).parent / "images" / "residency.svg"
LEFT, TOP, WIDTH, HEIGHT = 190, 66, 118, 30
COLOURS = {"drop": ENGINE, "copy": TRAINER, "copy_once": FROZEN}
LEGEND = (
    ("drop", "rollout engine: dropped, filled again"),
    ("copy", "trained: copied to the host"),
    ("copy_once", "frozen: a host copy stays"),
)
"""What becomes of the contents of a tenant that leaves the GPU."""


def draw() -> str:
    """Return the picture as SVG text."""
    width, bottom = LEFT + WIDTH * len(Phase) + 20, TOP + HEIGHT * len(RESIDENCY)
    shapes = [text(20, 28, "What is on the GPU in each phase of a step", anchor="start", weight="bold", size=16)]
    for column, phase in enumerate(Phase):
        shapes.append(text(LEFT + WIDTH * (column + 0.5), TOP - 10, phase.value, weight="bold", size=13))
    for row, (tenant, spec) in enumerate(RESIDENCY.items()):
        y = TOP + HEIGHT * row
        shapes.append(text(LEFT - 12, y + 20, tenant.replace("_", " ").replace("kv", "KV"), anchor="end", size=13))
        for column, phase in enumerate(Phase):
            is_here = phase in spec.phases
            fill = f'fill="{COLOURS[spec.on_release]}"' if is_here else f'fill="{FAINT}" fill-opacity="0.12"'
            x, size = LEFT + WIDTH * column + 2, f'width="{WIDTH - 4}" height="{HEIGHT - 4}"'
            shapes.append(f'<rect x="{x}" y="{y + 2}" {size} rx="4" {fill}/>')
    for place, (on_release, words) in enumerate(LEGEND):
        x = (20, 310, 550)[place]
        shapes.append(f'<rect x="{x}" y="{bottom + 16}" width="16" height="16" rx="3" fill="{COLOURS[on_release]}"/>')
        shapes.append(text(x + 24, bottom + 29, words, anchor="start", size=13))
    return picture(width, bottom + 46, "Residency of the tenants over the five phases of a step", shapes)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
