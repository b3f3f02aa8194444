"""All subjects of the fuzz tests, and how many cases of each a run of the tests takes."""

import torch
from transformers.utils import logging as transformers_logging

from tests.fuzz import (
    batches,
    chats,
    checkpoints,
    maths,
    model_folders,
    responses,
    rows,
    scores,
    settings,
    whole_checks,
)
from tests.fuzz.cases import Subject

# Transformers prints a table for every folder whose weights do not match, which some of the cases are about.
transformers_logging.set_verbosity(transformers_logging.CRITICAL)
transformers_logging.disable_progress_bar()
torch.set_num_threads(1)

_CASES = {
    "text prompts": (chats.check_text_prompt, 120),
    "chat prompts": (chats.check_chat_prompt, 160),
    "template files": (chats.check_template_file, 40),
    "rows": (rows.check_rows, 50),
    "splits": (rows.check_splits, 5),
    "wrong rows": (rows.check_wrong_row, 80),
    "damaged files": (rows.check_damaged_file, 60),
    "data sets": (rows.check_data_set, 50),
    "ptx texts": (rows.check_texts, 20),
    "numbers": (responses.check_numbers, 120),
    "math": (responses.check_math, 8),
    "formats": (responses.check_format, 40),
    "any response": (responses.check_any_response, 60),
    "judged text": (responses.check_judged_text, 50),
    "re-encoding": (responses.check_reencoding, 30),
    "rewards": (scores.check_rewards, 60),
    "groups": (scores.check_groups, 20),
    "sources": (scores.check_sources, 3),
    "services": (scores.check_service, 15),
    "advantages": (maths.check_advantages, 120),
    "policy losses": (maths.check_policy_losses, 30),
    "losses": (maths.check_losses, 30),
    "kl": (maths.check_kl, 10),
    "packing": (batches.check_packing, 50),
    "log-probs": (batches.check_logprobs, 20),
    "updates": (batches.check_update, 12),
    "checkpoints": (checkpoints.check_checkpoint, 50),
    "pointers": (checkpoints.check_pointer, 15),
    "no checkpoint": (checkpoints.check_no_checkpoint, 5),
    "metrics files": (checkpoints.check_metrics_file, 15),
    "phase logs": (checkpoints.check_phase_log, 20),
    "model folders": (model_folders.check_model_folder, 40),
    "tokenizer folders": (model_folders.check_tokenizer_folder, 20),
    "valid settings": (settings.check_valid_settings, 5),
    "wrong values": (settings.check_wrong_value, 20),
    "yaml traps": (settings.check_traps, 8),
    "settings files": (settings.check_structure, 20),
    "command lines": (settings.check_command_line, 10),
    "whole checks": (whole_checks.check_whole_run, 8),
}
SUBJECTS = {name: Subject(name=name, check=check, num_cases=number) for name, (check, number) in _CASES.items()}
"""Name -> subject."""
