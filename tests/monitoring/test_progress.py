"""What the display of a run shows, whatever the width of the console."""

from io import StringIO

import pytest
from rich.console import Console

from hybrid_rl.monitoring.progress import Progress


@pytest.fixture
def screen():
    return StringIO()


def test_without_a_terminal_each_step_is_one_line(screen, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    with Progress(3, console=Console(file=screen, width=20)) as progress:
        progress.show_phase("ROLLOUT")
        progress.show_step(1, {"reward": 0.5, "kl": 0.00123, "accuracy": 0.25, "tokens_per_s": 12345.6, "loss": 1.0})
        progress.show_step(2, {"reward": -0.75})
    first, second = screen.getvalue().splitlines()
    assert first.startswith("step 1/3  reward 0.500  KL 0.0012  accuracy 25.0%  tokens/s 12,346  0:00:00 elapsed")
    assert second.startswith("step 2/3  reward -0.750  KL 0.0012  accuracy 25.0%")
    assert "loss" not in first and "\x1b" not in first


def test_time_left_counts_only_the_steps_of_this_run(screen, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress(110, first_step=101, console=Console(file=screen, width=20)) as progress:
        now = 100.0 + 2 * 1800
        progress.show_step(102, {})
    assert screen.getvalue().endswith("1:00:00 elapsed  4:00:00 left\n")


def test_a_terminal_shows_phase_count_and_values(screen):
    console = Console(file=screen, force_terminal=True, width=160)
    with Progress(4, console=console) as progress:
        progress.show_step(1, {"reward": 0.5})
        progress.show_phase("UPDATE")
    last = [line for line in screen.getvalue().splitlines() if "UPDATE" in line][-1]
    assert "1/4" in last and "reward 0.500" in last and "left" in last


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_conversation_is_shown_as_it_is_however_narrow_the_console(screen, is_terminal):
    turns = [{"role": "assistant", "text": "[bold]7[/bold] " + "x" * 5000 + " end", "num_tokens": 2, "reward": 0.5}]
    row = {"prompt_id": 3, "prompt": "Guess.", "answer": None, "reward": 1.0, "num_tokens": 2, "is_truncated": False}
    with Progress(3, console=Console(file=screen, width=20, force_terminal=is_terminal)) as progress:
        progress.show_conversation(2, {**row, "turns": turns})
    shown = screen.getvalue()
    assert "step 2, prompt 3: reward 1, 1 turn of the model, 2 of 2 tokens sampled" in shown
    assert "[assistant: 2 tokens, reward 0.5]" in shown and "[bold]7[/bold] xxx" in shown and "xxx end" in shown
    assert len(shown) < 2000


def test_a_quiet_console_prints_nothing(screen):
    with Progress(1, console=Console(file=screen, quiet=True)) as progress:
        progress.show_step(1, {"reward": 1.0})
        progress.summary({"accuracy": 0.0}, {"accuracy": 1.0})
    assert screen.getvalue() == ""


def test_a_run_without_evaluations_has_no_summary(screen):
    Progress(1, console=Console(file=screen, width=80)).summary({}, {})
    assert screen.getvalue() == ""


@pytest.mark.parametrize("width", [10, 80, 200])
def test_summary_compares_what_both_have(screen, width):
    progress = Progress(1, console=Console(file=screen, width=width))
    progress.summary({"accuracy": 0.125, "length": 2000, "old": 1.0}, {"accuracy": 0.875, "length": 1500, "new": 1.0})
    cells = [line.split() for line in screen.getvalue().splitlines()]
    assert ["metric", "before", "after", "change"] in cells
    assert ["accuracy", "0.125", "0.875", "+0.75"] in cells
    assert ["length", "2,000", "1,500", "-500"] in cells
    assert not any("old" in row or "new" in row for row in cells)
