"""The files that tokenizers come in, each as the text of a tokenizer.json."""

import base64
import json
import os
import re
from glob import escape, glob
from typing import Any

from bloomery.base.bounded import LARGE_BYTES, parse_json, read_text
from bloomery.base.errors import DataError, Problem

FILES = ("tokenizer.json", "*merges.txt", "*vocab.txt", "*.tiktoken")
"""A folder with one of them holds a tokenizer; the first counts. Megatron calls its own `gpt2-merges.txt`."""
HIGHEST_ID = (1 << 24) - 1
_END = "<|endoftext|>"
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = {
    "r50k": (_GPT2, 50256),
    "p50k": (_GPT2, 50256),
    "cl100k": (rf"{_CONTRACTIONS}|{_LETTERS}\p{{L}}+" + _REST % "", 100257),
    "o200k": (
        rf"{_LETTERS}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LETTERS}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?" + _REST % "/",
        199999,
    ),
}
"""By the beginning of a .tiktoken file's name: what cuts a text into words, and the id of the end of a document. The
file has neither."""


_LONGEST = 512
"""Real ones have up to 128 bytes, of spaces."""


def tokenizer_file(path: str) -> str | None:
    """That of a folder, or the path itself if it is a file. DataError where a folder has several."""
    if os.path.isfile(path):
        return re.sub(r"vocab\.json$", "merges.txt", path)
    for pattern in FILES:
        found = sorted(glob(os.path.join(escape(path), pattern)), key=lambda file: (len(file), file))
        if len(found) > 1 and os.path.basename(found[0]) != pattern.lstrip("*"):
            what = f"holds several tokenizers: {', '.join(map(os.path.basename, found[:4]))}"
            raise DataError(Problem(what, "a folder is that of one", f"name the file: {found[0]}", path))
        if found:
            return found[0]
    return None


def as_tokenizer_json(file: str) -> str:
    """DataError where it cannot be read."""
    for ending, read in (("merges.txt", _gpt2), ("vocab.txt", _bert), (".tiktoken", _tiktoken)):
        if file.endswith(ending):
            return read(file)
    return _read(file)


def vocab_size_of(tokenizer: Any) -> int:
    """Of one of the library. ValueError where ids are not unique, or so high that tables by id would fill memory."""
    ids = tokenizer.get_vocab().values()
    if len({*ids}) != len(ids) or (highest := max(ids, default=-1)) > HIGHEST_ID:
        raise ValueError(f"each token has an id of its own, from 0 to {HIGHEST_ID:,}")
    return int(highest) + 1


def _tiktoken(path: str) -> str:
    """Words as tiktoken cuts them, and every pair of tokens that makes a third one as a merge, the earliest first."""
    name = next((name for name in _TIKTOKEN if os.path.basename(path).startswith(name)), None)
    if name is None:
        rule = f"its name says how words are cut; known are {', '.join(_TIKTOKEN)}"
        raise DataError(Problem(f"{os.path.basename(path)} is of no known kind", rule, "give it its name again", path))
    pattern, end = _TIKTOKEN[name]
    try:
        rows = [line.split() for line in _read(path).splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
        if not all(bytes([byte]) in ranks for byte in range(256)) or end in ranks.values():
            raise ValueError(f"it needs all 256 bytes, and no token {end}")
        if max(map(len, ranks)) > _LONGEST:
            raise ValueError(f"a token has more than {_LONGEST} bytes")
    except ValueError as error:
        raise _broken(path, f"cannot be read: {error}", "a line is a token in base64 and its rank") from error
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": end, "content": _END, **flags}],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]},
            "decoder": level,
            "model": {
                "type": "BPE",
                "ignore_merges": True,
                "vocab": {spelled[token]: rank for token, rank in ranks.items()} | {_END: end},
                "merges": [[spelled[first], spelled[second]] for first, second in merges],
            },
        }
    )


def _byte_letters() -> list[str]:
    """GPT-2's letter for every byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]


def _gpt2(path: str) -> str:
    from tokenizers import ByteLevelBPETokenizer

    folder = os.path.dirname(path)
    vocab = read_beside(folder, os.path.basename(path).removesuffix("merges.txt") + "vocab.json")
    lines = [line for line in _read(path).split("\n") if line.strip() and not line.startswith("#version")]
    prefix_space = bool(read_beside(folder, "tokenizer_config.json").get("add_prefix_space", False))
    try:
        pairs = [(first, second) for first, second in map(str.split, lines)]
        tokenizer = ByteLevelBPETokenizer(vocab, pairs, add_prefix_space=prefix_space)
        vocab_size_of(tokenizer)  # the library takes all memory when it saves one with a hole of billions of ids
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        rule = "a line is a pair of tokens of vocab.json"
        raise _broken(path, f"does not fit the vocab.json beside it: {error}", rule) from error
    if _END in vocab:
        tokenizer.add_special_tokens([_END])
    return str(tokenizer.to_str())


def _bert(path: str) -> str:
    from tokenizers import BertWordPieceTokenizer, decoders

    tokens = _read(path).removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if missing := [token for token in _BERT_SPECIAL if token not in vocab]:
        raise _broken(path, f"lacks {', '.join(missing)}", "BERT's vocabulary has one token a line, these among them")
    config = read_beside(os.path.dirname(path), "tokenizer_config.json")
    tokenizer = BertWordPieceTokenizer(
        vocab,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=accents if type(accents := config.get("strip_accents")) is bool else None,
        lowercase=bool(config.get("do_lower_case", "-cased" not in os.path.basename(path))),
    )
    tokenizer.decoder, tokenizer.post_processor = decoders.WordPiece(cleanup=False), None
    return str(tokenizer.to_str())


def read_settings(folder: str) -> dict[str, Any]:
    """What a folder says of its tokenizer beside tokenizer.json, as transformers reads it: the older
    special_tokens_map.json counts where the config lists no tokens. DataError for a file that is no JSON object."""
    config, older = read_beside(folder, "tokenizer_config.json"), read_beside(folder, "special_tokens_map.json")
    return config if "added_tokens_decoder" in config else {**config, **older}


def token_of(setting: Any) -> str | None:
    """The token of a setting such as `eos_token`, which may come with its flags; None where it names none."""
    text = setting.get("content") if isinstance(setting, dict) else setting
    return text if isinstance(text, str) else None


def read_beside(folder: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer's folder; empty if there is no such file."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}
    try:
        return {**parse_json(_read(path))}
    except (ValueError, TypeError) as error:
        raise _broken(path, f"holds no JSON object: {error}", "") from error


def _read(path: str) -> str:
    try:
        return read_text(path, LARGE_BYTES, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        rule = "a tokenizer is a folder with a Hugging Face tokenizer.json, GPT-2's vocab.json and merges.txt, BERT's "
        rule += "vocab.txt or a .tiktoken file, such a file, or hf://org/name of the Hub"
        remedy = "correct tokenizer.path, or make one with `bloomery tokenizer train`"
        raise DataError(Problem(what, rule, remedy, path)) from error


def _broken(path: str, what: str, rule: str) -> DataError:
    return DataError(Problem(what, rule, "copy the file again from where the tokenizer came from", path))
