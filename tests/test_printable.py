"""What a model or a scorer has written reaches terminals and logs without anything that a terminal obeys."""

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.monitoring.metrics import write_rollouts
from hybrid_rl.printable import PrintableRecord, hide_passwords, printable, secret_in_url
from hybrid_rl.rewards.remote import RemoteScorer
from hybrid_rl.validate import validate
from launch.colocated import parse
from launch.settings import exit_on_config_error
from tests.programs import PATHS

ROOT = Path(__file__).parents[1]
RED, CONTROL_SEQUENCE = "\x1b[31m", "\x9b2J"
CLIPBOARD = "\x1b]52;c;cm0gLXJmIC8=\x07"
"""Lets a terminal put a command into the clipboard."""
ORDINARY = "na\u00efve \u4f60\u597d\u3000\U0001f600 \u00a0\\u001b"
"""Letters, spaces and symbols of several writings, and an escape that is written out."""


@pytest.mark.parametrize(
    "text, shown",
    [
        (RED, "\\u001b[31m"),
        (CONTROL_SEQUENCE, "\\u009b2J"),
        ("90%\rfailed\b\x7f\0", "90%\\u000dfailed\\u0008\\u007f\\u0000"),
        ("a\u202eb\u2066c\u200b", "a\\u202eb\\u2066c\\u200b"),
        ("\u2028\u2029\ud83d", "\\u2028\\u2029\\ud83d"),
        ("\U000e0041", "\\udb40\\udc41"),
        ("line\n\tcode", "line\n\tcode"),
        (
            "na\u00efve \u4f60\u597d\u3000\U0001f600 \u00a0\\u001b",
            "na\u00efve \u4f60\u597d\u3000\U0001f600 \u00a0\\u001b",
        ),
        ("", ""),
    ],
)
def test_what_a_terminal_obeys_is_escaped_and_other_text_stays(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    "url, hidden, secret",
    [
        ("http://me:pw@h/score", "http://***@h/score", "a user name or password"),
        ("https://h/d.jsonl?a=1&token=t1&b=2", "https://h/d.jsonl?a=1&token=***&b=2", "the parameter token"),
        ("https://h/d?X-Amz-Signature=ab%2F#x", "https://h/d?X-Amz-Signature=***#x", "the parameter X-Amz-Signature"),
        ("https://h/d?api_key=k", "https://h/d?api_key=***", "the parameter api_key"),
        ("https://h/d?split=train&page=2", "https://h/d?split=train&page=2", None),
        ("https://h/d?monkey=1&design=2", "https://h/d?monkey=1&design=2", None),
        ("data/monkey=1.jsonl", "data/monkey=1.jsonl", None),
    ],
)
def test_secrets_in_urls_are_found_and_hidden(url, hidden, secret):
    assert hide_passwords(f"GET {url} fails") == f"GET {hidden} fails"
    assert secret_in_url(url) == secret


def test_a_json_text_keeps_its_meaning():
    value = {"response": "".join(map(chr, range(0x3000))) + "\ud83d \U0001f600 \U000e0041"}
    text = printable(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value and "\x1b" not in text and "\x9b" not in text


def test_the_file_of_rollouts_can_be_shown_in_a_terminal(tmp_path):
    path = write_rollouts(tmp_path, 1, [{"response": f"{RED}{CONTROL_SEQUENCE}{CLIPBOARD}\u4f60"}])
    text = path.read_text(encoding="utf-8")
    assert text.removesuffix("\n").isprintable() and "\u4f60" in text
    assert json.loads(text) == {"response": f"{RED}{CONTROL_SEQUENCE}{CLIPBOARD}\u4f60"}


def test_a_message_of_a_log_is_escaped_with_its_arguments():
    record = PrintableRecord("a", logging.WARNING, "file.py", 1, "%s: %s", ("prompt 1", f"{RED}no"), None)
    assert record.getMessage() == "prompt 1: \\u001b[31mno"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_loggers_and_traces_of_a_process_are_escaped():
    ended = run(
        """
        import logging
        from hybrid_rl.printable import escape_messages
        escape_messages()
        logging.getLogger("any").warning("the response %s", "\\x1b[31m")
        raise ValueError("the response \\x1b]52;c;\\x07")
        """
    )
    assert ended.returncode == 1 and "\x1b" not in ended.stderr
    assert "the response \\u001b[31m" in ended.stderr
    assert "Traceback (most recent call last):" in ended.stderr
    assert ended.stderr.endswith("ValueError: the response \\u001b]52;c;\\u0007\n")


@pytest.mark.parametrize("kind, code", [("config.ConfigError", 2), ("errors.RewardLostError", 4)])
def test_the_sentence_that_ends_a_command_is_escaped(kind, code):
    module, name = kind.split(".")
    ended = run(
        f"""
        from hybrid_rl.{module} import {name}
        from launch.settings import exit_on_config_error
        with exit_on_config_error():
            raise {name}("the scorer says \\x1b[31m\\ud83d")
        """
    )
    assert (ended.returncode, ended.stderr) == (code, "error: the scorer says \\u001b[31m\\ud83d\n")


def test_what_a_scorer_prints_and_raises_is_escaped(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "import sys\n"
        "def score(prompt, response):\n"
        "    print(response)\n"
        "    print(response, file=sys.stderr)\n"
        "    raise ValueError(response)\n"
    )
    ended = run(
        """
        import sys
        from hybrid_rl.batch import Prompt, Rollout
        from hybrid_rl.printable import escape_messages
        from hybrid_rl.rewards.pool import ScorerPool
        escape_messages()
        prompt = Prompt(prompt_id=0, text="p", token_ids=[1])
        text = "\\x1b[31m\\ud83d"
        rollout = Rollout(
            prompt=prompt, sequence_id=0, response_ids=[], rollout_logprobs=[], is_truncated=False, text=text
        )
        with ScorerPool([f"{sys.argv[1]}:score"], timeout_s=20.0, num_workers=1, on_error="zero") as pool:
            assert pool.score([rollout]).scores == [0.0]
        """,
        str(file),
    )
    assert ended.returncode == 0, ended.stderr
    shown = "\\u001b[31m\\ud83d"
    lines = ended.stderr.splitlines()
    assert lines[:2] == [shown, shown] and f"ValueError: {shown}" in lines[2] and "\x1b" not in ended.stderr


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://user:secret@host/x", "http://***@host/x"),
        ("['https://user:s@cret@host:8000', 'http://token@other']", "['https://***@host:8000', 'http://***@other']"),
        ("//user:secret@host", "//***@host"),
        ("http://host/path?mail=a@b.c, me@host", "http://host/path?mail=a@b.c, me@host"),
    ],
)
def test_passwords_in_urls_are_hidden(text, shown):
    assert hide_passwords(text) == shown
    assert PrintableRecord("a", logging.INFO, "file.py", 1, "%s", (text,), None).getMessage() == shown


@pytest.mark.parametrize(
    "urls",
    [
        '["http://user:secret@host/x"]',
        "http://user:secret@host/x",
        '[["http://user:secret@host/x"]]',
        '{"a": "http://user:secret@host/x"}',
        '["ftp://user:secret@host/x"]',
        '["http://user:secret@[host/x"]',
        '["http://user:p/secret@host/x"]',
        '["http://host:secret@/x"]',
        f'["http://{"u" * 300}:secret@host/x"]',
    ],
)
def test_a_password_in_a_reward_url_is_refused_and_not_shown(urls, tmp_path, capfd):
    arguments = ["--run.dir", str(tmp_path), "--reward.remote_urls", urls]
    with pytest.raises(SystemExit) as ended, exit_on_config_error():
        config, _ = parse(arguments)
        RemoteScorer(validate(config).reward.remote_urls, timeout_s=1.0, retries=0, stall_timeout_s=1.0)
    shown = capfd.readouterr()
    assert ended.value.code == 2 and shown.err.startswith("error: reward.remote_urls")
    assert "secret" not in shown.out + shown.err
    assert list(tmp_path.iterdir()) == []


PRINTING = """
import sys
from hybrid_rl.printable import keep_output
def refuse(reason):
    sys.exit(f"refused: {reason}")
keep_output({on_loss})
for _ in range(10):
    print("a" * 2000)
sys.stdout.flush()
print("done", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "on_loss, code, output",
    [
        ("None", 0, "stdout cannot be written (No space left on device): the run goes on without it\ndone\n"),
        ("refuse", 1, "refused: No space left on device\n"),
    ],
)
def test_a_full_disk_under_stdout_ends_a_process_only_where_it_must(on_loss, code, output):
    with open("/dev/full", "w") as full:
        ended = run_printing(on_loss, full)
    assert (ended.returncode, ended.stderr) == (code, output)


def test_a_closed_pipe_under_stdout_does_not_end_a_process():
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_printing("None", writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (0, "done")


def run_printing(on_loss: str, stdout: Any) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PRINTING.replace("{on_loss}", on_loss)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **PATHS},
    )
