"""Draw the diagrams of docs/architecture.md into docs/images: python docs/draw_diagrams.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.svg import ENGINE, FAINT, FROZEN, HOST, PAPER, TRAINER, arrow, box, picture, text

IMAGES = Path(__file__).parent / "images"


def data_flow() -> str:
    """Return the path of a batch through the phases of a step."""
    shapes = [
        box(20, 30, 150, 64, ["prompts", "file, folder, task"], fill=HOST),
        box(225, 30, 170, 64, ["ROLLOUT", "vLLM generates"], fill=ENGINE),
        box(450, 30, 170, 64, ["SCORE: rewards", "rules, model, HTTP"], fill=FROZEN),
        box(675, 30, 185, 64, ["SCORE: log-probs", "actor, reference, critic"], fill=FROZEN),
        box(675, 160, 185, 64, ["SCORE: advantages", "GAE or a group"], fill=FROZEN),
        box(450, 160, 170, 64, ["UPDATE_CRITIC", "value loss"], fill=TRAINER),
        box(225, 160, 170, 64, ["UPDATE_ACTOR", "policy loss, KL, ptx"], fill=TRAINER),
        box(20, 160, 150, 64, ["SYNC", "new weights"], fill=ENGINE),
        box(225, 290, 635, 50, ["the run's folder: metrics.jsonl, rollouts/, timeline.json, checkpoints/"], fill=HOST),
        arrow((170, 62), (225, 62)),
        arrow((395, 62), (450, 62)),
        arrow((620, 62), (675, 62)),
        arrow((767, 94), (767, 160)),
        arrow((675, 192), (620, 192)),
        arrow((450, 192), (395, 192)),
        arrow((225, 192), (170, 192)),
        arrow((95, 160), (95, 127), (310, 127), (310, 94)),
        arrow((310, 224), (310, 290), dashed=True),
        arrow((535, 224), (535, 290), dashed=True),
        arrow((767, 224), (767, 290), dashed=True),
    ]
    return picture(880, 360, "The data of a step: from prompts through the phases to the updates", shapes)


def weight_path() -> str:
    """Return the two ways of new weights into the engine."""
    shapes = [
        text(20, 30, "sync.mode = alias: one copy of the weights", anchor="start", weight="bold", size=15),
        box(20, 48, 190, 64, ["trainer", "steps on views of it"], fill=TRAINER),
        box(285, 48, 240, 64, ["alias buffer on the GPU", "laid out as vLLM fuses layers"], fill=PAPER),
        box(600, 48, 190, 64, ["vLLM engine", "parameters are views"], fill=ENGINE),
        arrow((210, 80), (285, 80), label="views"),
        arrow((600, 80), (525, 80), label="views"),
        text(20, 160, "sync.mode = copy: through one bucket", anchor="start", weight="bold", size=15),
        box(20, 178, 190, 64, ["trainer", "gathers under ZeRO-3"], fill=TRAINER),
        box(285, 178, 115, 64, ["first half", "is filled"], fill=PAPER),
        box(410, 178, 115, 64, ["second half", "is emptied"], fill=PAPER),
        box(600, 178, 190, 64, ["vLLM engine", "copies into place"], fill=ENGINE),
        arrow((210, 210), (285, 210), label="fill"),
        arrow((525, 210), (600, 210), label="copy"),
        text(20, 290, "Both modes: verification", anchor="start", weight="bold", size=15),
        box(20, 308, 190, 64, ["names", "every parameter filled"], fill=HOST),
        box(285, 308, 240, 64, ["checksums", "all at the start, then in rotation"], fill=HOST),
        box(600, 308, 190, 64, ["log-probs", "engine against trainer"], fill=HOST),
        arrow((210, 340), (285, 340)),
        arrow((525, 340), (600, 340)),
    ]
    return picture(810, 390, "How new weights reach the rollout engine", shapes)


def processes() -> str:
    """Return the processes of a node with two GPUs."""
    shapes = [box(290, 20, 280, 54, ["launcher", "colocated.py or ray_cluster.py"], fill=HOST)]
    for rank, x in enumerate((20, 450)):
        centre = x + 195
        shapes += [
            f'<rect x="{x}" y="120" width="390" height="240" rx="8" fill="none" stroke="{FAINT}"/>',
            text(x + 14, 142, f"GPU {rank}", anchor="start", weight="bold"),
            box(
                x + 20,
                156,
                350,
                70,
                [f"worker process, rank {rank}", "actor, critic, reference, reward model"],
                fill=TRAINER,
            ),
            box(x + 20, 268, 165, 72, ["vLLM engine", "child process"], fill=ENGINE),
            box(x + 205, 268, 165, 72, ["scorers", "reward.num_workers", "killable, one response"], fill=FROZEN),
            arrow((430, 74), (430, 96), (centre, 96), (centre, 156)),
            arrow((x + 102, 226), (x + 102, 268)),
            arrow((x + 287, 226), (x + 287, 268)),
        ]
    shapes.append(arrow((390, 191), (470, 191)))
    shapes.append(arrow((470, 191), (390, 191)))
    shapes.append(
        text(430, 386, "Ranks run the same train(config) and meet in torch.distributed collectives.", size=13)
    )
    return picture(860, 404, "The processes of a node with two GPUs", shapes)


PICTURES = {"data_flow": data_flow, "weight_path": weight_path, "processes": processes}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")
