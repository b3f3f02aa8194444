"""Programs whose command lines each option of launch/colocated.py reads."""

from . import coati, coati_grpo, coati_ray, openrlhf, trl, verl

SYSTEMS = {
    "--from-openrlhf": (openrlhf.PROGRAM,),
    "--from-coati": (coati.PROGRAM, coati_grpo.PROGRAM, coati_ray.PROGRAM),
    "--from-verl": (verl.PROGRAM,),
    "--from-trl": (trl.PROGRAM,),
}
