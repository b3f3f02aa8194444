"""Environments in worker processes: their answers, and what a failing, hanging or dying one costs."""

import math
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.builtin import BUILT_IN, BuiltIn
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.process import Answer
from hybrid_rl.environments.protocol import Reset, Step
from hybrid_rl.processes import read_state

FILE = '''
import asyncio
import os
import sys
import time

class Guess:
    """A number from the row; a text that is no number makes the environment do what it says."""

    def __init__(self, reward=1.0):
        self.reward = reward

    def reset(self, row):
        self.number = row["number"]
        return "guess" if row.get("text") else [{"role": "user", "content": "guess"}]

    def step(self, response):
        if response == "raise":
            raise LookupError("no such guess")
        if response == "exit":
            raise SystemExit(3)
        if response == "die":
            os._exit(3)
        if response == "hang":
            time.sleep(60)
        if response == "nan":
            return "", float("nan"), False, {}
        if response == "pid":
            return "", 0.0, False, {"pid": os.getpid()}
        guess = int(response)
        done = guess == self.number
        return "lower" if guess > self.number else "higher", self.reward * done, done, {"distance": guess - self.number}

class Closing(Guess):
    """A file is written at the end; a number above 9 hangs there."""

    def close(self):
        if self.number > 9:
            time.sleep(600)
        with open(os.environ["CLOSED"], "a") as file:
            file.write(f"{self.number} ")
        if self.number == 9:
            raise OSError("cannot close")

class Holding(Guess):
    def step(self, response):
        self.held = b"x" * int(response)
        return "", 0.0, False, {}

class Blocking:
    """An asynchronous class that waits without await."""

    async def reset(self, row):
        return ""

    async def step(self, response):
        if response == "wait":
            await asyncio.sleep(600)
        time.sleep(600)

class Babbling(Guess):
    def step(self, response):
        os.write(int(sys.argv[1]), (2).to_bytes(4, "big") + b"[]")
        time.sleep(600)

class AsyncGuess:
    async def close(self):
        await asyncio.sleep(0.01)
        with open(os.environ["CLOSED"], "a") as file:
            file.write(f"{self.number} ")

    async def reset(self, row):
        self.number = row["number"]
        return "guess"

    async def step(self, response):
        if response == "hang":
            await asyncio.sleep(60)
        await asyncio.sleep(0.3)
        return "seen " + response, float(self.number), False, {}

class Echo:
    """Tools for the conversation; its steps give back what they get."""

    @classmethod
    def prepare(cls, schemas):
        cls.tools = [schemas]

    def __init__(self, schemas):
        self.schemas = schemas

    def reset(self, row):
        return {"messages": None, "tools": self.tools}

    def step(self, response):
        return [{"role": "tool", "content": response["content"]}], 0.0, False, {"turn": response}

class Silent:
    def reset(self, row):
        return ""
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "guess.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def shared(file: Path) -> Iterator[EnvironmentPool]:
    """One process for all conversations."""
    with EnvironmentPool(f"{file}:Guess", timeout_s=30, num_workers=1) as pool:
        yield pool


def answers(pool: EnvironmentPool, number: int) -> dict[int, Answer]:
    """Return the next answers by their keys, in the time of a slow machine."""
    found, end = list[Answer](), time.monotonic() + 60
    while len(found) < number:
        assert time.monotonic() < end, found
        found += pool.receive(1.0)
    assert len(found) == number
    return {answer.key: answer for answer in found}


def started(pool: EnvironmentPool, *keys: int) -> None:
    for key in keys:
        pool.reset(key, {"number": key})
    assert all(answer.failure is None for answer in answers(pool, len(keys)).values())


def test_a_conversation_keeps_its_environment_until_it_is_done(file):
    with EnvironmentPool(f"{file}:Guess", arguments={"reward": 2.5}, timeout_s=30, num_workers=2) as pool:
        pool.reset(3, {"number": 3})
        pool.reset(5, {"number": 5, "text": True})
        found = answers(pool, 2)
        assert found[3].result == Reset(observation=[{"role": "user", "content": "guess"}])
        assert found[5].result == Reset(observation="guess")
        assert len(pool.process_ids) == 2
        pool.step(3, "4")
        pool.step(5, "4")
        found = answers(pool, 2)
        assert found[3].result == Step(observation="lower", info={"distance": 1})
        assert found[5].result == Step(observation="higher", info={"distance": -1})
        pool.step(3, "3")
        assert answers(pool, 1)[3].result == Step(observation="higher", reward=2.5, done=True, info={"distance": 0})
        pool.end(3)
        with pytest.raises(KeyError):
            pool.step(3, "3")


def test_a_conversation_with_tools_steps_with_messages_of_the_assistant(file):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    turn = {"role": "assistant", "content": "so", "tool_calls": [call]}
    with EnvironmentPool(f"{file}:Echo", arguments={"schemas": tool}, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, {"number": 1})
        assert answers(pool, 1)[1].result == Reset(observation=None, tools=[tool])
        pool.step(1, turn)
        assert answers(pool, 1)[1].result == Step(observation=[{"role": "tool", "content": "so"}], info={"turn": turn})


def test_arguments_that_a_class_does_not_take_are_named_at_the_start(file):
    with pytest.raises(ConfigError, match=r"environment.arguments = \{'size': 3\}: 'Guess' takes others: .*'size'"):
        EnvironmentPool(f"{file}:Guess", arguments={"size": 3}, timeout_s=30, num_workers=1)


def test_a_built_in_environment_without_its_package_names_the_extra(monkeypatch):
    absent = BuiltIn(module="hybrid_rl.environments.adapters.absent", class_name="X", package="no_gym", extra="no-gym")
    monkeypatch.setitem(BUILT_IN, "absent", absent)
    with pytest.raises(ConfigError) as caught:
        EnvironmentPool("absent", timeout_s=30, num_workers=1)
    assert list(caught.value.messages) == [
        "environment.name = absent: the package no_gym is not installed: python -m pip install 'hybrid_rl[no-gym]'"
    ]


def test_an_error_of_one_environment_is_an_answer_with_the_line_of_the_code(shared):
    started(shared, 1, 2)
    for response, message in (
        ("raise", "LookupError: no such guess (guess.py, line 19: raise"),
        ("exit", "SystemExit: 3"),
        ("nan", "the reward is nan: must be finite"),
    ):
        shared.reset(1, {"number": 1})
        answers(shared, 1)
        shared.step(1, response)
        shared.step(2, "2")
        found = answers(shared, 2)
        assert found[1].failure is not None and found[1].failure.startswith(message)
        assert not found[1].is_lost and found[1].result is None
        assert found[2].result == Step(observation="higher", reward=1.0, done=True, info={"distance": 0})


def test_calls_of_an_ended_conversation_are_not_answered(shared):
    started(shared, 7)
    shared.step(7, "1")
    shared.reset(7, {"number": 8, "text": True})  # a new environment under the same key
    shared.step(7, "8")
    end, found = time.monotonic() + 60, list[Answer]()
    while len(found) < 2 and time.monotonic() < end:
        found += shared.receive(1.0)
    assert [answer.result for answer in found] == [
        Reset(observation="guess"),
        Step(observation="higher", reward=1.0, done=True, info={"distance": 0}),
    ]
    assert shared.receive(0.2) == []


def test_a_hanging_call_fails_at_its_limit_and_its_neighbours_start_again(file):
    with EnvironmentPool(f"{file}:Guess", timeout_s=2, num_workers=2) as pool:
        started(pool, 1, 2, 3)  # 1 and 3 share a process
        pool.step(1, "hang")
        before = time.monotonic()
        found = answers(pool, 2)
        assert time.monotonic() - before < 20
        assert found[1].failure == "took longer than environment.timeout_s = 2" and not found[1].is_lost
        assert found[3].is_lost and "another conversation's call took longer" in str(found[3].failure)
        assert pool.num_lost_processes == 1
        pool.step(2, "2")
        assert answers(pool, 1)[2].result.done
        started(pool, 3)
        pool.step(3, "3")
        assert answers(pool, 1)[3].result.done


@pytest.mark.parametrize("way", ["of itself", "by a signal"])
def test_conversations_of_a_process_that_dies_are_reported_as_lost(file, way):
    with EnvironmentPool(f"{file}:Guess", timeout_s=30, num_workers=1) as pool:
        started(pool, 1, 2)
        pool.step(1, "pid")
        process_id = answers(pool, 1)[1].result.info["pid"]
        assert pool.process_ids == [process_id]
        if way == "of itself":
            pool.step(1, "die")
        else:
            os.kill(process_id, signal.SIGKILL)
        found = answers(pool, 2)
        event = "ended with exit code 3" if way == "of itself" else "was killed by SIGKILL"
        assert all(a.is_lost and a.failure == f"the environment process {process_id} {event}" for a in found.values())
        started(pool, 1)  # in a new process
        assert pool.process_ids != [process_id] and pool.num_lost_processes == 1


def test_asynchronous_environments_of_a_process_run_at_the_same_time(file):
    with EnvironmentPool(f"{file}:AsyncGuess", timeout_s=3, num_workers=1) as pool:
        started(pool, *range(20))
        before = time.monotonic()
        for key in range(1, 20):
            pool.step(key, f"{key}")
        found = answers(pool, 19)
        assert time.monotonic() - before < 19 * 0.3
        assert all(a.result == Step(observation=f"seen {k}", reward=float(k)) for k, a in found.items())
        pool.step(0, "hang")
        pool.step(1, "again")
        assert answers(pool, 1)[1].result.observation == "seen again"
        hanging = answers(pool, 1)[0]
        assert hanging.failure == "took longer than environment.timeout_s = 3" and not hanging.is_lost
        assert pool.num_lost_processes == 0  # the limit of an asynchronous call costs no other conversation


def test_a_close_that_hangs_ends_at_the_limit_and_makes_no_other_call_late(file, tmp_path, monkeypatch):
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    settings = {"num_workers": 1, "environment_variables": ["CLOSED"]}
    with EnvironmentPool(f"{file}:Closing", timeout_s=2, **settings) as pool:
        started(pool, 1, 2, 30)
        pool.end(30)
        pool.step(1, "1")
        found = answers(pool, 2)  # of 1, whose call waits for the close, and of 2, which has no call
        assert all(answer.is_lost for answer in found.values())
        assert "was killed, because close() of an ended conversation took longer" in str(found[1].failure)
        assert (pool.num_lost_processes, pool.num_lost_conversations) == (1, 2)
        started(pool, 1)
    assert (tmp_path / "closed").read_text() == "1 "


@pytest.mark.parametrize("name", ["Closing", "AsyncGuess"])
def test_environments_are_closed_when_their_conversation_or_the_pool_ends(file, name, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    with EnvironmentPool(f"{file}:{name}", timeout_s=30, num_workers=1, environment_variables=["CLOSED"]) as pool:
        started(pool, 1, 9)
        pool.end(9)
        started(pool, 2)
        assert pool.num_calls == 3 and pool.seconds >= 0
    assert sorted((tmp_path / "closed").read_text().split()) == ["1", "2", "9"]
    failures = [record.getMessage() for record in caplog.records if "close() of an environment" in record.getMessage()]
    assert len(failures) == (name == "Closing") and all("OSError: cannot close" in text for text in failures)


def test_a_process_that_holds_too_much_memory_is_killed_and_named(file):
    with EnvironmentPool(f"{file}:Holding", timeout_s=30, num_workers=1, memory_limit_bytes=2 * 10**8) as pool:
        started(pool, 1, 2)
        pool.step(1, "1000000")
        assert answers(pool, 1)[1].failure is None
        pool.step(1, "400000000")
        found = list[Answer]()
        while not any(answer.is_lost for answer in found):
            found += pool.receive(10)
        assert {answer.key for answer in found if answer.is_lost} == {1, 2}
        assert "held more than environment.memory_limit_bytes = 200000000" in str(found[-1].failure)
        assert pool.num_lost_processes == 1
        started(pool, 1)


def test_an_asynchronous_method_that_blocks_is_killed_and_named(file):
    with EnvironmentPool(f"{file}:Blocking", timeout_s=1, num_workers=1) as pool:
        started(pool, 1, 2)
        pool.step(2, "wait")  # the limit of this call is the first to pass
        pool.step(1, "")
        found = answers(pool, 2)
        assert "took longer than environment.timeout_s = 1 and kept the event loop" in str(found[1].failure)
        assert not found[1].is_lost and found[2].is_lost


def test_a_process_that_sends_something_else_is_lost(file):
    with EnvironmentPool(f"{file}:Babbling", timeout_s=30, num_workers=1) as pool:
        started(pool, 1)
        pool.step(1, "")
        found = answers(pool, 1)[1]
        assert found.is_lost and str(found.failure).endswith("sent something that is no answer")


def test_a_stopped_process_delays_no_one_and_its_conversations_start_again(file):
    """The turn is longer than the buffer of the connection, so that it cannot be sent to a stopped process."""
    with EnvironmentPool(f"{file}:Guess", timeout_s=2, num_workers=2) as pool:
        started(pool, 1, 2)
        pool.step(1, "pid")
        os.kill(answers(pool, 1)[1].result.info["pid"], signal.SIGSTOP)
        before = time.monotonic()
        pool.step(1, "9" * 2**22)
        assert time.monotonic() - before < 1
        pool.step(2, "2")
        assert answers(pool, 1)[2].result.done
        lost = answers(pool, 1)[1]
        assert lost.is_lost and str(lost.failure).endswith("timeout_s = 2 and is stopped (SIGSTOP or a debugger)")


def test_a_caller_that_waits_itself_uses_the_connections_and_the_time_of_the_next_look(file):
    with EnvironmentPool(f"{file}:Guess", timeout_s=30, num_workers=2) as pool:
        started(pool, 1, 2)
        assert pool.next_look == math.inf and len(pool.connections) == 2
        pool.step(2, "2")
        assert 0 < pool.next_look - time.monotonic() <= 30
        ready = multiprocessing.connection.wait(pool.connections, timeout=60)
        assert len(ready) == 1 and [answer.key for answer in pool.receive()] == [2]


def test_no_process_survives_the_pool(file):
    pool = EnvironmentPool(f"{file}:Guess", timeout_s=30, num_workers=2)
    started(pool, 1, 2)
    ids = pool.process_ids
    states = [read_state(process_id) for process_id in ids]
    assert all(state is not None and not state.has_ended for state in states)
    pool.close()
    states = [read_state(process_id) for process_id in ids]
    assert not any(state is not None and not state.has_ended for state in states)


@pytest.mark.parametrize(
    "name, message",
    [
        ("guess", "environment.name = guess: must be path.py:name"),
        ("nowhere.py:Guess", "environment.name = nowhere.py:Guess: there is no file"),
        ("{file}:Other", "defines no class or function 'Other'"),
        ("{file}:Silent", "'Silent' has no method step"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_named(file, name, message):
    with pytest.raises(ConfigError) as caught:
        EnvironmentPool(name.format(file=file), timeout_s=30, num_workers=1)
    assert message in str(caught.value)


def test_a_file_that_fails_is_named_with_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("import os\nraise OSError('no game')\n")
    with pytest.raises(ConfigError, match=r"importing \S+broken.py fails with OSError: no game \(broken.py, line 2"):
        EnvironmentPool(f"{tmp_path}/broken.py:Guess", timeout_s=30, num_workers=1)
