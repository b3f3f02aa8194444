"""Random tokenizers of the usual kinds, random chat templates, and random text; what each does is known."""

import random
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<answer>", "</answer>"]
NAMES = [("<s>", "</s>"), ("<bos>", "<eos>"), ("<|begin_of_text|>", "<|eot_id|>"), ("[CLS]", "[SEP]")]
WORDS = ["the answer is ", "2+2", "1,000", " 3/4", "\n\n", "  ", "\\boxed{5}", "<b>"]
HALF_MARKUP = ["{{ x }}", "{% if %}", "</s", "<think"]
SCRIPTS = "\u00e9|e\u0301|\u0434\u0430|\u4f60\u597d|\U0001f600|\u200d|\u05d0\u05d1|\u202e|\ufeff|\u00a0|\u2212|\u2581"
PIECES = [*"abcdxyz0123456789 .,+-=*/()[]{}<>\\'\"$%#\n\t", *WORDS, *HALF_MARKUP, *SCRIPTS.split("|")]
CONTROL = ["\x00", "\x07", "\x1b[31m", "\x85", "\u2028", "\x7f"]


def random_text(
    rng: random.Random, *, longest: int = 12, marks: tuple[str, ...] = (), is_empty_fine: bool = True
) -> str:
    """Return random text: words, digits, markup, other scripts, control characters, and some of the given marks."""
    pieces = PIECES + (CONTROL if rng.random() < 0.2 else []) + list(marks)
    text = "".join(rng.choice(pieces) for _ in range(rng.randint(0 if is_empty_fine else 1, longest)))
    return text if is_empty_fine or text.strip() else text + "x"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A tokenizer, and how it was made."""

    tokenizer: PreTrainedTokenizerFast
    core: Tokenizer
    """The library's own tokenizer without post-processor: what the ids of a text are, without special tokens."""
    adds_bos: bool
    adds_eos: bool
    special: tuple[str, ...]
    """Tokens that decoding skips as special."""
    ordinary_marks: tuple[str, ...]
    """Added tokens that are not special."""

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text alone."""
        return self.core.encode(text, add_special_tokens=False).ids

    def id(self, token: str) -> int:
        """Return the id of a token."""
        found = self.core.token_to_id(token)
        assert found is not None
        return found


def _bytes_core(rng: random.Random) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("1", "2"), ("=", "3"), ("\u0120", "a")][: rng.randint(0, 4)]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.2, use_regex=rng.random() < 0.5)
    core.decoder = decoders.ByteLevel()
    return core


def _characters_core(rng: random.Random) -> Tokenizer:
    characters = sorted({c for piece in PIECES for c in piece if rng.random() < 0.9} | set("abc012 "))
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<unk>", *characters])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return core


METASPACE_DECODERS = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def _metaspace_core(rng: random.Random) -> Tokenizer:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789+-=.,"]
    merges = [("\u2581", "t"), ("1", "2")]
    tokens = ["<unk>", *fallback, *characters, *(a + b for a, b in merges)]
    core = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(["first", "never", "always"]), split=False)
    core.decoder = decoders.Sequence(METASPACE_DECODERS)
    return core


KINDS = {"bytes": _bytes_core, "characters": _characters_core, "metaspace": _metaspace_core}


def random_tokenizer(rng: random.Random, *, kind: str | None = None, has_eos: bool = True) -> Drawn:
    """Return a tokenizer with random special tokens and a random post-processor, without a chat template."""
    core = KINDS[kind or rng.choice(list(KINDS))](rng)
    bos, eos = rng.choice(NAMES)
    has_bos = rng.random() < 0.7
    ordinary = tuple(mark for mark in MARKS[2:] if rng.random() < 0.3)
    special = (*([bos] if has_bos else []), *([eos] if has_eos else []), *MARKS[:2])
    special += tuple(mark for mark in MARKS[2:] if mark not in ordinary and rng.random() < 0.3)
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in ordinary])
    adds_bos, adds_eos = has_bos and rng.random() < 0.6, has_eos and rng.random() < 0.3
    plain = Tokenizer.from_str(core.to_str())
    if isinstance(core.decoder, decoders.Sequence) and rng.random() < 0.5:  # as Llama's, which hides the first space
        core.decoder = decoders.Sequence([*METASPACE_DECODERS, decoders.Strip(" ", 1, 0)])
    if adds_bos or adds_eos:
        single = " ".join([*([bos] if adds_bos else []), "$A", *([eos] if adds_eos else [])])
        used = [(token, core.token_to_id(token)) for token in (bos, eos) if token in single.split()]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
    names: dict[str, Any] = {"bos_token": bos} if has_bos else {}
    names |= {"eos_token": eos} if has_eos else {}
    names |= {"pad_token": eos} if has_eos and rng.random() < 0.7 else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    return Drawn(
        tokenizer=tokenizer,
        core=plain,
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        special=special,
        ordinary_marks=ordinary,
    )


@dataclass(frozen=True, kw_only=True)
class DrawnTemplate:
    """A chat template, and what it writes at the end of a prompt."""

    source: str
    prefill: str
    """What it writes in the model's name after the assistant's header."""
    roles: tuple[str, ...]
    """Roles that it takes before it raises; empty takes all."""


PREFILLS = ["", "", "", "<think>\n", "<think>\n\n</think>\n\n", "<think>", "Let me think.\n", " "]
DATE = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}"
STYLES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}",
        "<|im_start|>assistant\\n",
    ),
    "spaced": (
        "{%- for m in messages -%}\n  {{- '### ' + m.role | capitalize }}\n{{ m.content | trim }}\n\n{% endfor -%}\n",
        "### Assistant\\n",
    ),
    "thinking": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip() + '<|im_end|>' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}",
        "<|im_start|>assistant\\n",
    ),
    "last_turn": (
        "{% for m in messages[-1:] %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}",
        "<|im_start|>assistant\\n",
    ),
    "strict": (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception('Only system, user and assistant, got ' + m.role) }}{% endif %}"
        "{% if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}",
        "<|im_start|>assistant\\n",
    ),
    "instruct": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'system' %}{{ '<<SYS>>' + m.content + '<</SYS>>' }}"
        "{% else %}{{ ' ' + m.content + ' ' }}{% endif %}{% endfor %}",
        "",
    ),
}


def random_template(rng: random.Random, *, has_bos: bool) -> DrawnTemplate:
    """Return a chat template of a random style, which may write BOS, a date, and the start of the response."""
    style = rng.choice(list(STYLES))
    body, header = STYLES[style]
    start = "{{ bos_token }}" if has_bos and rng.random() < 0.4 else ""
    start += DATE if rng.random() < 0.2 else ""
    if rng.random() < 0.2:
        start += "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}"
    prefill = rng.choice(PREFILLS) if header else ""
    escaped = prefill.replace("\n", "\\n")
    end = f"{{% if add_generation_prompt %}}{{{{ '{header}{escaped}' }}}}{{% endif %}}" if header else ""
    return DrawnTemplate(source=start + body + end, prefill=prefill, roles=())


def random_messages(rng: random.Random, *, marks: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Return chat messages that end with the user's: perhaps a system message, then turns in order."""
    messages = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        answer = random_text(rng)
        if rng.random() < 0.5:
            answer = f"<think>{random_text(rng)}</think>{answer}"
        messages += [
            {"role": "user", "content": random_text(rng, marks=marks)},
            {"role": "assistant", "content": answer},
        ]
    return [*messages, {"role": "user", "content": random_text(rng, is_empty_fine=False, marks=marks)}]
