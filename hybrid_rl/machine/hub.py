"""The Hugging Face hub: where it cannot be reached, its local cache is used at once."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import requests
from huggingface_hub import constants

TIMEOUT_S = 5.0
"""Time in which the hub must answer."""

logger = logging.getLogger(__name__)


def use_cache_if_unreachable(names: Iterable[str]) -> None:
    """Switch the hub's libraries to their local cache, with a warning, if a name needs the hub and it does not answer.

    Otherwise they would try for minutes. The engine's processes inherit the choice.

    Args:
        names: paths of folders and files, or names on the hub.
    """
    wanted = [name for name in names if not Path(name).exists()]
    if not wanted or constants.is_offline_mode():
        return
    try:
        requests.head(constants.ENDPOINT, timeout=TIMEOUT_S, allow_redirects=False)
    except requests.RequestException:
        logger.warning(
            "%s does not answer: %s can be read from the local cache alone; set HF_HUB_OFFLINE=1 to use it at once",
            constants.ENDPOINT,
            ", ".join(wanted),
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
