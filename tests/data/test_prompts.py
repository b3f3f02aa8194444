"""Rows, token ids and order of prompts."""

import datetime
import decimal
import json
import math
import sys
from dataclasses import replace
from itertools import chain

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybrid_rl.batch import Prompt, Rollout
from hybrid_rl.config import ConfigError, PromptsConfig
from hybrid_rl.data.order import PromptLoader
from hybrid_rl.data.prompts import encode_prompt, load_prompts, load_rows
from hybrid_rl.rewards.pool import ScorerPool

ROWS = [{"prompt": f"say {n}", "answer": str(n), "level": n % 3} for n in range(5)]
CHAT = [{"role": "user", "content": "say 7"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS = 0


def make_tokenizer(*, adds_bos: bool = True, template: str | None = None) -> PreTrainedTokenizerFast:
    words = ["say", "[", "]", "user", "assistant", "system", "be", "brief", *map(str, range(10))]
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- rows


def test_rows_are_taken_from_the_start(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    assert load_rows(path, PromptsConfig(), seed=0) == ROWS
    assert load_rows(path, PromptsConfig(), seed=0, num_rows=2) == ROWS[:2]


def test_a_missing_file_and_a_row_without_an_answer_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"prompts\.path = .*absent\.jsonl: no such file or folder"):
        load_rows(str(tmp_path / "absent.jsonl"), PromptsConfig(), seed=0)
    (tmp_path / "data.csv").write_text("prompt,answer\na\n")
    with pytest.raises(ConfigError, match="row 0 has fewer fields than the header"):
        load_rows(str(tmp_path / "data.csv"), PromptsConfig(), seed=0)


def test_task_rows_carry_the_entry_and_depend_on_the_seed_only():
    config = PromptsConfig(num_generated=4, task_options={"min_terms": 2, "max_terms": 2})
    rows = load_rows("reasoning_gym:chain_sum", config, seed=1)
    assert len(rows) == 4 and rows == load_rows("reasoning_gym:chain_sum", config, seed=1)
    assert rows[0]["prompt"] == rows[0]["entry"]["question"] and rows[0]["answer"] == rows[0]["entry"]["answer"]
    assert len(load_rows("reasoning_gym:chain_sum", config, seed=1, num_rows=7)) == 7


def test_task_rows_of_neighbouring_seeds_do_not_overlap():
    config = PromptsConfig(num_generated=50, task_options={"min_digits": 6, "max_digits": 8})
    train, held_out = (load_rows("reasoning_gym:chain_sum", config, seed=seed) for seed in (0, 1))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_task_without_a_single_answer_is_accepted():
    rows = load_rows("reasoning_gym:graph_color", PromptsConfig(num_generated=1), seed=0)
    assert rows[0]["answer"] is None and rows[0]["entry"]["metadata"]["source_dataset"] == "graph_color"


@pytest.mark.parametrize(
    "text, settings, message",
    [
        (
            '{"q": "a", "answer": "b"}',
            {},
            "no column 'prompt'; set prompts.prompt_column to one of: q, answer",
        ),
        (
            '{"prompt": "a", "q": "b"}',
            {},
            "no column 'answer'; set prompts.answer_column to one of: prompt, q",
        ),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}', {}, "row 1 has no column 'answer'"),
        ('{"prompt": "a", "answer": null}', {}, r"row 0: 'answer' \(prompts.answer_column\) is empty"),
        ('{"prompt": "a", "answer": {"b": 1}}', {}, "must be text, a number or a list of them"),
        ('{"prompt": "a", "answer": [["b"]]}', {}, "must be text, a number or a list of them"),
        ('{"prompt": "a", "answer": ["b", " "]}', {}, "is empty or not a finite number"),
        ('{"prompt": "a", "answer": []}', {}, "is an empty list"),
        ('{"prompt": 3, "answer": "b"}', {}, r"row 0: 'prompt' \(prompts.prompt_column\) must be text, or a list of"),
        ('{"prompt": [], "answer": "b"}', {}, "must be text, or a list of"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', {}, "text in `role` and `content`"),
        ("", {}, "prompts.path = .*holds no rows"),
        ("", {"eval_path": "data.jsonl"}, "prompts.eval_path = .*holds no rows"),
    ],
)
def test_rows_that_lack_a_prompt_or_an_answer_are_named(text, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_rows("data.jsonl", PromptsConfig(**settings), seed=0)


NUMBERS = [1.5, None, 2.0]


def write_numbers(path, kind):
    """Write a column of floats with a missing value, as pyarrow, pandas and Python's csv module write it."""
    prompts = [f"say {n}" for n in range(3)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "answer": NUMBERS}), path)
    elif kind == "NaN in parquet":
        pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "answer": [1.5, math.nan, 2.0]}), path)
    elif kind == "text in parquet":
        table = pandas.DataFrame({"prompt": prompts, "answer": NUMBERS})
        table.astype({"answer": str}).to_parquet(path)
    elif kind == "pandas csv":
        pandas.DataFrame({"prompt": prompts, "answer": NUMBERS}).to_csv(path, index=False)
    else:
        missing = {"csv": "", "nan in csv": "nan", "None in csv": "None"}[kind]
        path.write_text(f"prompt,answer\nsay 0,1.5\nsay 1,{missing}\nsay 2,2.0\n")


@pytest.mark.parametrize(
    "kind", ["parquet", "NaN in parquet", "text in parquet", "pandas csv", "csv", "nan in csv", "None in csv"]
)
def test_a_missing_number_is_never_an_answer(kind, tmp_path):
    path = tmp_path / ("data.parquet" if "parquet" in kind else "data.csv")
    write_numbers(path, kind)
    with pytest.raises(ConfigError, match=r"row 1: 'answer' \(prompts.answer_column\) is "):
        load_rows(str(path), PromptsConfig(path=str(path)), seed=0)


def test_a_word_for_a_missing_number_is_an_answer_among_other_texts(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("prompt,answer\nsay 1,1\nsay nan,NaN\nsay x,x\n")
    assert [row["answer"] for row in load_rows(str(path), PromptsConfig(), seed=0)] == ["1", "NaN", "x"]


def test_a_wrong_task_its_options_and_a_missing_package_are_named(monkeypatch):
    with pytest.raises(ConfigError, match="no task 'chain_sun'; did you mean: chain_sum"):
        load_rows("reasoning_gym:chain_sun", PromptsConfig(), seed=0)
    with pytest.raises(ConfigError, match=r"prompts\.task_options = {'terms': 2} do not suit it: .*'terms'"):
        load_rows("reasoning_gym:chain_sum", PromptsConfig(task_options={"terms": 2}), seed=0)
    with pytest.raises(ConfigError, match=r"prompts\.task_options = {'min_terms': 0}"):
        load_rows("reasoning_gym:chain_sum", PromptsConfig(task_options={"min_terms": 0}), seed=0)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        load_rows("reasoning_gym:chain_sum", PromptsConfig(), seed=0)


# --- token ids


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template_bos", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("chat", [True, False])
def test_bos_occurs_once_if_tokenizer_or_template_adds_it(adds_bos, template_bos, chat):
    tokenizer = make_tokenizer(adds_bos=adds_bos, template=template_bos + TEMPLATE)
    ids = encode_prompt(tokenizer, {"prompt": "say 7"}, PromptsConfig(chat=chat)).token_ids
    assert ids.count(BOS) == int(adds_bos or (chat and bool(template_bos)))
    assert BOS not in ids[1:]


def test_text_that_begins_with_bos_has_it_once():
    assert encode_prompt(make_tokenizer(), {"prompt": "<s> say 7"}, PromptsConfig()).token_ids.count(BOS) == 1


def test_text_has_the_token_ids_of_the_tokenizer():
    tokenizer = make_tokenizer()
    prompt = encode_prompt(tokenizer, ROWS[3] | {"answer": 3}, PromptsConfig(), prompt_id=3)
    assert prompt == Prompt(
        prompt_id=3, text="say 3", token_ids=tokenizer("say 3")["input_ids"], answer="3", metadata={"level": 0}
    )


def columns() -> dict[str, pyarrow.Array]:
    """Return one value of every type that a Parquet file can give a row."""
    seconds = pyarrow.array([1714979289], pyarrow.int64())
    return {
        "number": pyarrow.array([2**63 - 1]),
        "missing": pyarrow.array([None]),
        "blob": pyarrow.array([b"\x00\xff"]),
        "day": pyarrow.array([datetime.date(2024, 5, 6)]),
        "time": pyarrow.array([datetime.time(7, 8, 9, 5)]),
        "local": seconds.cast(pyarrow.timestamp("s")),
        "zoned": seconds.cast(pyarrow.timestamp("us", "Europe/Berlin")),
        "nanoseconds": pyarrow.array([1714979289123456789]).cast(pyarrow.timestamp("ns", "+02:00")),
        "duration": pyarrow.array([5]).cast(pyarrow.duration("us")),
        "short": pyarrow.array([5]).cast(pyarrow.duration("ns")),
        "price": pyarrow.array([decimal.Decimal("1.50")]),
        "nested": pyarrow.array([{"a": [1.5, None], "b": {"c": "d"}}]),
        "pairs": pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "uuid": pyarrow.array([bytes(range(16))], pyarrow.uuid()),
    }


def test_a_scorer_sees_the_other_columns_of_a_row_unchanged(tmp_path):
    table = {"prompt": pyarrow.array(["say 7"]), **columns()}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "data.parquet")
    settings = PromptsConfig(answer_column=None)
    (prompt,) = load_prompts(str(tmp_path / "data.parquet"), make_tokenizer(), settings, seed=0).prompts
    assert list(prompt.metadata) == list(columns())
    seen = tmp_path / "seen"
    (tmp_path / "rewards.py").write_text(
        f"def score(prompt, response):\n    open({str(seen)!r}, 'w').write(repr(prompt.metadata))\n    return 1.0\n"
    )
    rollout = Rollout(prompt=prompt, sequence_id=0, response_ids=[], rollout_logprobs=[], is_truncated=False, text="7")
    with ScorerPool([f"{tmp_path / 'rewards.py'}:score"], timeout_s=20.0, num_workers=1, on_error="raise") as pool:
        assert pool.score([rollout]).scores == [1.0]
    assert seen.read_text() == repr(prompt.metadata)


def test_a_column_that_no_other_process_can_be_sent_is_refused_when_it_is_read(tmp_path):
    interval = pyarrow.array([(1, 2, 3)], pyarrow.month_day_nano_interval())
    with pytest.raises(ConfigError, match=r"^row 5: column 'every': a value of type .*MonthDayNano.* cannot be serial"):
        row = {"prompt": "say 7", "every": interval.to_pylist()[0]}
        encode_prompt(make_tokenizer(), row, PromptsConfig(), prompt_id=5)


def test_chat_ends_where_the_response_begins():
    tokenizer = make_tokenizer(adds_bos=False, template=TEMPLATE)
    wrapped = encode_prompt(tokenizer, {"prompt": "say 7"}, PromptsConfig(chat=True))
    messages = encode_prompt(tokenizer, {"prompt": CHAT}, PromptsConfig())
    assert (
        replace(wrapped, messages=CHAT, user_text=None) == messages
        and wrapped.user_text == "say 7"
        and wrapped.text == "[user] say 7 [assistant]"
    )
    assert messages.token_ids == tokenizer(wrapped.text)["input_ids"]
    with_system = encode_prompt(tokenizer, {"prompt": CHAT}, PromptsConfig(system_message="be brief"))
    assert with_system.text == "[system] be brief [user] say 7 [assistant]"


@pytest.mark.parametrize(
    "prompt, settings, template, message",
    [
        ("", {}, None, "row 5: its prompt '' gives no tokens"),
        (CHAT, {}, None, "row 5 is a chat prompt but the tokenizer .* has no chat template"),
        ("say 7", {"chat": True}, None, "row 5 is a chat prompt"),
        ("say 7", {"system_message": "be brief"}, TEMPLATE, "prompts.system_message is set but row 5 is text"),
        (
            [{"role": "system", "content": "x"}, *CHAT],
            {"system_message": "be brief"},
            TEMPLATE,
            "row 5 already starts with a system message",
        ),
        (CHAT, {}, "{{ raise_exception('no users') }}", "row 5: the chat template refuses .*: no users"),
    ],
)
def test_rows_that_cannot_be_encoded_are_named(prompt, settings, template, message):
    tokenizer = make_tokenizer(adds_bos=False, template=template)
    with pytest.raises(ConfigError, match=message):
        encode_prompt(tokenizer, {"prompt": prompt}, PromptsConfig(**settings), prompt_id=5)


def test_overlong_prompts_are_an_error_or_dropped_and_counted(tmp_path, caplog):
    prompts = ["1", "1 2", "1 2 3", "1 2 3 4"]  # 1 to 4 tokens, with a limit of 2
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": p} for p in prompts])
    tokenizer, settings = make_tokenizer(adds_bos=False), {"answer_column": None, "max_prompt_tokens": 2}
    finding = "2 of 4 prompts are longer than prompts.max_prompt_tokens = 2, first row 2 with 3 tokens"
    with pytest.raises(ConfigError, match=f"{finding}: raise the limit or set prompts.overlong_prompts = drop"):
        load_prompts(path, tokenizer, PromptsConfig(**settings), seed=0)

    kept = load_prompts(path, tokenizer, PromptsConfig(**settings, overlong_prompts="drop"), seed=0).prompts
    assert [p.prompt_id for p in kept] == [0, 1] and finding in caplog.text
    with pytest.raises(ConfigError, match="leaves none"):
        path = write_jsonl(tmp_path / "long.jsonl", [{"prompt": p} for p in prompts[2:]])
        load_prompts(path, tokenizer, PromptsConfig(**settings, overlong_prompts="drop"), seed=0)


# --- order


def make_prompts(num):
    return [Prompt(prompt_id=n, text=str(n), token_ids=[n, n + 1], answer=str(n)) for n in range(num)]


def make_loader(*, num=10, batch_size=4, seed=0, shuffle=True, rank=0, world_size=1):
    return PromptLoader(
        make_prompts(num), batch_size=batch_size, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size
    )


def take(loader, num_steps):
    return [[p.prompt_id for p in loader.next_batch()] for _ in range(num_steps)]


def test_a_smaller_batch_ends_each_epoch():
    steps = take(make_loader(), 6)
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    first, second = list(chain(*steps[:3])), list(chain(*steps[3:]))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert take(make_loader(num=3, batch_size=8), 2) != [[], []]
    assert take(make_loader(shuffle=False), 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_order_does_not_depend_on_the_number_of_ranks(world_size):
    ranks = [take(make_loader(rank=rank, world_size=world_size), 6) for rank in range(world_size)]
    for step, expected in enumerate(take(make_loader(), 6)):
        local = [ranks[rank][step] for rank in range(world_size)]
        assert local == [expected[rank::world_size] for rank in range(world_size)]


def test_the_order_depends_on_the_seed():
    assert take(make_loader(seed=0), 3) == take(make_loader(seed=0), 3) != take(make_loader(seed=1), 3)


@pytest.mark.parametrize("num_before", [0, 1, 3, 4, 7])
def test_resumed_equals_uninterrupted(num_before):
    expected = take(make_loader(), 12)
    before = make_loader(rank=1, world_size=2)
    take(before, num_before)
    state = json.loads(json.dumps(before.state_dict()))

    resumed = make_loader()  # another number of ranks
    take(resumed, 2)
    resumed.load_state_dict(state)
    assert take(resumed, 12 - num_before) == expected[num_before:]


def test_state_of_other_data_or_order_is_refused():
    state = make_loader().state_dict()
    for change in ({"token_ids": [7]}, {"answer": "other"}):
        prompts = make_prompts(10)
        prompts[4] = Prompt(**vars(prompts[4]) | change)
        with pytest.raises(ConfigError, match="the data set is not the checkpoint's"):
            PromptLoader(prompts, batch_size=4, seed=0, shuffle=True).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed = 1, but the checkpoint's prompt order has seed = 0"):
        make_loader(seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="shuffle = False"):
        make_loader(shuffle=False).load_state_dict(state)


def test_loader_needs_prompts_and_a_batch_size():
    with pytest.raises(ConfigError, match="no prompts"):
        make_loader(num=0)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        make_loader(batch_size=0)
