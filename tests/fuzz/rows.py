"""Fuzz subjects: data files of every format, whole and damaged, and the prompts of a data set in their order."""

import csv
import dataclasses
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hybrid_rl.config import ConfigError, PromptsConfig, PtxConfig
from hybrid_rl.data.order import PromptLoader
from hybrid_rl.data.prompts import load_prompts, load_rows
from hybrid_rl.data.texts import load_text_sets
from tests.fuzz.cases import Refusal, check_refused, outcome
from tests.fuzz.tokenizers import random_messages, random_text, random_tokenizer

Rows = list[dict[str, Any]]
FORMATS = [".jsonl", ".json", "array.json", ".csv", ".parquet", "folder"]


def random_rows(rng: random.Random, *, is_chat: bool | None = None) -> Rows:
    """Return valid rows: prompts of text or of messages, answers of text or of numbers, and another column."""
    is_chat = rng.random() < 0.3 if is_chat is None else is_chat
    is_number = rng.random() < 0.3
    rows = []
    for number in range(rng.randint(1, 6)):
        prompt: Any = random_messages(rng) if is_chat else random_text(rng, is_empty_fine=False)
        answer: Any = rng.choice([0, -3, 17, 10**6]) if is_number else random_text(rng, is_empty_fine=False)
        rows.append({"prompt": prompt, "answer": answer, "level": number})
    return rows


def write_rows(rows: Rows, kind: str, folder: Path) -> Path:
    """Write rows in a format and return the file; JSON and Parquet keep types, CSV keeps text."""
    path = folder / f"rows{kind}" if kind.startswith(".") else folder / ("rows.json" if "json" in kind else "rows")
    if kind in (".jsonl", ".json"):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif kind == "array.json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif kind == ".csv":
        path.write_text(_csv_text(rows), encoding="utf-8", newline="")
    elif kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def _csv_text(rows: Rows) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["prompt", "answer", "level"])
    for row in rows:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])
        writer.writerow([prompt, row["answer"], row["level"]])
    return text.getvalue()


def random_format(rng: random.Random) -> str:
    """Return a format; a folder of Hugging Face datasets takes longest to write."""
    return rng.choices(FORMATS, weights=[6, 3, 3, 4, 4, 1])[0]


def check_rows(rng: random.Random, folder: Path) -> None:
    """Rows come back from every format as they were written."""
    rows, kind = random_rows(rng), random_format(rng)
    if kind == ".csv" and any("\x00" in str(row) for row in rows):
        kind = ".jsonl"
    path = write_rows(rows, kind, folder)
    if kind not in (".parquet", "folder") and rng.random() < 0.2:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    num_rows = rng.choice([None, None, 1, 2, 100])
    found = outcome(lambda: load_rows(str(path), PromptsConfig(path=str(path)), seed=0, num_rows=num_rows))
    assert not isinstance(found, Refusal), f"refuses {kind} rows: {found}"
    expected = rows[:num_rows]
    assert len(found) == len(expected), f"{len(found)} rows of {len(expected)} in {kind}"
    for row, wanted in zip(found, expected, strict=True):
        assert row["prompt"] == wanted["prompt"], f"{kind}: {row['prompt']!r} instead of {wanted['prompt']!r}"
        assert str(row["answer"]) == str(wanted["answer"]), f"{kind}: {row['answer']!r} for {wanted['answer']!r}"
        assert str(row["level"]) == str(wanted["level"])


def check_splits(rng: random.Random, folder: Path) -> None:
    """A folder with splits gives the training rows to the training alone, and held-out rows to the evaluation."""
    import datasets

    datasets.disable_progress_bars()
    held_out = rng.choice(["test", "validation", "dev", "heldout"])
    names = rng.sample(["train", held_out], rng.randint(1, 2))
    parts = {name: [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(rng.randint(1, 3))] for name in names}
    path = str(folder / "splits")
    datasets.DatasetDict({n: datasets.Dataset.from_list(rows) for n, rows in parts.items()}).save_to_disk(path)
    for field, wanted in (("path", "train"), ("eval_path", held_out)):
        config = PromptsConfig(**{"path": "other.jsonl", field: path})
        found = outcome(lambda config=config: load_rows(path, config, seed=0), f"prompts.{field}")
        if len(names) == 1:  # nothing to choose from
            wanted = names[0]
        if not isinstance(found, Refusal):
            assert found == parts[wanted], f"prompts.{field} takes {found} of {parts}"
        else:
            assert len(names) == 2 or wanted == "train", f"refuses the only split {names}: {found}"


WRONG_PROMPTS: list[Any] = [None, 5, True, [], {}, [5], [{}], [{"role": "user"}], [{"role": 1, "content": "a"}], "DEL"]
WRONG_ANSWERS: list[Any] = [None, math.nan, "", "  ", "\n", [], ["4", ""], ["4", None], {"value": 4}, "DEL"]


def check_wrong_row(rng: random.Random, folder: Path) -> None:
    """A row without a usable prompt or answer is refused, and the sentence names row and column."""
    rows, number = random_rows(rng), 0
    kind = rng.choice([".jsonl", "array.json", ".parquet"])
    number = rng.randrange(len(rows))
    column = rng.choice(["prompt", "answer"])
    value = rng.choice(WRONG_PROMPTS if column == "prompt" else WRONG_ANSWERS)
    if value == "DEL":
        del rows[number][column]
    else:
        rows[number][column] = value
    try:
        path = write_rows(rows, kind, folder)
    except pyarrow.ArrowException:
        path = write_rows(rows, ".jsonl", folder)  # Parquet has one type per column
    found = outcome(lambda: load_rows(str(path), PromptsConfig(path=str(path)), seed=0), "rows")
    check_refused(found, f"row {number} with {column} = {value!r}")
    for message in found.messages:
        is_no_json = f"row {number} has NaN, which JSON does not allow" in message
        if is_no_json or (f"row {number}" in message and column in message) or f"line {number + 1} " in message:
            return
    raise AssertionError(f"does not name row {number} and {column}: {found}")


def check_damaged_file(rng: random.Random, folder: Path) -> None:
    """A damaged file is refused in a sentence that names it, or gives rows of the whole file from its start."""
    rows, kind = random_rows(rng), rng.choice(FORMATS[:5])
    path = write_rows(rows, kind, folder)
    data = path.read_bytes()
    damage = rng.choice(["cut", "cut", "bytes", "flip", "latin-1", "utf-16", "empty", "other name", "gzip"])
    if damage == "cut":
        data = data[: rng.randrange(len(data))]
    elif damage == "bytes":
        data = rng.randbytes(rng.randint(1, 200))
    elif damage == "flip":
        place = rng.choice([rng.randrange(len(data)), rng.randrange(min(8, len(data))), len(data) - 1])
        data = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    elif damage in ("latin-1", "utf-16"):
        data = json.dumps({"prompt": "caf\u00e9 1", "answer": "\u00fc"}, ensure_ascii=False).encode(damage)
    elif damage == "empty":
        data = rng.choice([b"", b"\n", b"  \n\n", b"[]", b"{}", b"null", b"5", b"prompt,answer\n"])
    elif damage == "other name":
        path = path.with_suffix(rng.choice([".txt", ".xlsx", "", ".jsonl.gz", ".parquet", ".csv"]))
    elif damage == "gzip":
        data = b"\x1f\x8b" + rng.randbytes(40)
    path.write_bytes(data)
    found = outcome(lambda: load_rows(str(path), PromptsConfig(path=str(path)), seed=0), path.name)
    if isinstance(found, Refusal) or damage in ("flip", "other name"):
        return
    assert damage == "cut" and kind in (".jsonl", ".json", ".csv"), f"accepts {damage} of {kind}: {str(found)[:200]}"
    whole = [{**row, "prompt": row["prompt"]} for row in rows][: len(found)]
    last = -1 if kind == ".csv" else len(found)  # the end of a CSV file cannot be told from a cut
    for row, wanted in list(zip(found, whole, strict=True))[:last]:
        assert (row["prompt"], str(row["answer"])) == (wanted["prompt"], str(wanted["answer"])), "other rows"


def check_data_set(rng: random.Random, folder: Path) -> None:
    """Prompts keep order and number of their rows; overlong ones are refused, or dropped and none else."""
    drawn = random_tokenizer(rng)
    rows = random_rows(rng, is_chat=False)
    path = write_rows(rows, ".jsonl", folder)
    limit, handling = rng.randint(1, 20), rng.choice(["error", "drop"])
    config = PromptsConfig(path=str(path), max_prompt_tokens=limit, overlong_prompts=handling)
    lengths = []
    for row in rows:
        ids = drawn.ids(row["prompt"])
        has_bos = drawn.adds_bos and ids[:1] != [drawn.tokenizer.bos_token_id]
        lengths.append(len(ids) + has_bos)
    fitting = [number for number, length in enumerate(lengths) if length <= limit]
    found = outcome(lambda: load_prompts(str(path), drawn.tokenizer, config, seed=0).prompts, "rows.jsonl", "row ")
    if min(lengths) == 0:
        check_refused(found, f"a prompt without tokens: {rows}")
    elif len(fitting) < len(rows) and (handling == "error" or not fitting):
        check_refused(found, f"lengths {lengths} over {limit}")
    else:
        assert not isinstance(found, Refusal), f"refuses lengths {lengths}, limit {limit}: {found}"
        assert [prompt.prompt_id for prompt in found] == fitting
        assert [len(prompt.token_ids) for prompt in found] == [lengths[number] for number in fitting]
        assert [prompt.answer for prompt in found] == [str(rows[number]["answer"]) for number in fitting]
        assert [prompt.metadata for prompt in found] == [{"level": number} for number in fitting]
        _check_order(rng, found)


def _check_order(rng: random.Random, prompts: list[Any]) -> None:
    """Epochs are permutations, ranks divide every batch, and a resumed loader continues in the same order."""
    size, world_size = rng.randint(1, 4), rng.choice([1, 2, 3])
    settings = {"batch_size": size, "seed": rng.randrange(9), "shuffle": rng.random() < 0.7}
    loaders = [PromptLoader(prompts, rank=r, world_size=world_size, **settings) for r in range(world_size)]
    per_epoch = math.ceil(len(prompts) / size)
    orders = []
    for _ in range(2):
        steps = [[loader.next_batch() for loader in loaders] for _ in range(per_epoch)]
        whole = [sorted(p.prompt_id for part in step for p in part) for step in steps]
        assert [len(step) for step in whole] == [
            min(size, len(prompts) - first) for first in range(0, len(prompts), size)
        ]
        orders.append(whole)
        assert sorted(i for step in whole for i in step) == [p.prompt_id for p in prompts], f"no permutation: {whole}"
    alone = PromptLoader(prompts, **settings)
    done = rng.randrange(2 * per_epoch)
    for _ in range(done):
        alone.next_batch()
    resumed = PromptLoader(prompts, **settings)
    resumed.load_state_dict(json.loads(json.dumps(alone.state_dict())))
    rest = [sorted(p.prompt_id for p in resumed.next_batch()) for _ in range(2 * per_epoch - done)]
    assert rest == (orders[0] + orders[1])[done:], f"resumes with {rest} after {done} steps of {orders}"
    other = dataclasses.replace(prompts[0], answer="another answer")
    changed = PromptLoader([other, *prompts[1:]], **settings)
    try:
        changed.load_state_dict(alone.state_dict())
    except ConfigError:
        return
    raise AssertionError("resumes with another answer in the data set")


def check_texts(rng: random.Random, folder: Path) -> None:
    """The ids of a text for the language-model loss are BOS as added, the text's, and one EOS; long ones are cut."""
    drawn, limit = random_tokenizer(rng), rng.randint(2, 20)
    texts = [random_text(rng, is_empty_fine=False) for _ in range(rng.randint(1, 4))]
    path = write_rows([{"text": text} for text in texts], ".jsonl", folder)
    bos, eos = drawn.tokenizer.bos_token_id, drawn.tokenizer.eos_token_id
    expected = []
    for text in texts:
        ids = drawn.ids(text)
        ids = [bos, *ids] if drawn.adds_bos and ids[:1] != [bos] else ids
        expected.append([*ids, eos][:limit])
    config = PtxConfig(path=str(path), max_tokens=limit)
    found = outcome(lambda: load_text_sets(config, drawn.tokenizer)[0].texts, "rows.jsonl")
    if min(map(len, expected)) < 2:
        check_refused(found, f"a text of fewer than two tokens: {texts}")
        return
    assert not isinstance(found, Refusal), f"refuses {texts}: {found}"
    ids = [text.token_ids for text in found]
    assert ids == expected, f"{texts}: {ids} instead of {expected}"
