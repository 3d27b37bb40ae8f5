"""The files a tokenizer comes in, each as the text of a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import orjson

from bloomery.base.bounded import LARGE_BYTES, check_depth, read_text
from bloomery.base.errors import DataError, Problem

FILES = ("tokenizer.json", "merges.txt", "vocab.txt")
"""A folder with one of them holds a tokenizer; the first counts."""
_END_OF_TEXT = "<|endoftext|>"
HIGHEST_ID = (1 << 24) - 1
_OWN_ID = f"each token has an id of its own, from 0 to {HIGHEST_ID:,}"
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_tokenizer_json(folder: str) -> tuple[str, str]:
    """(the file that a folder's tokenizer was read from, its tokenizer.json). DataError where it holds none."""
    if not os.path.exists(json_file := os.path.join(folder, "tokenizer.json")):
        if os.path.exists(merges := os.path.join(folder, "merges.txt")):
            return merges, _gpt2(folder)
        if os.path.exists(vocab := os.path.join(folder, "vocab.txt")):
            return vocab, _bert(folder)
    return json_file, _read(json_file)


def _read(path: str) -> str:
    try:
        return read_text(path, LARGE_BYTES, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            Problem(
                what=f"cannot be read: {getattr(error, 'strerror', None) or error}",
                rule="a tokenizer is a folder with a Hugging Face tokenizer.json, GPT-2's vocab.json and merges.txt, "
                "or BERT's vocab.txt",
                remedy="correct tokenizer.path, or make one with `bloomery tokenizer train`",
                place=path,
            )
        ) from error


def _gpt2(folder: str) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab_path, path = os.path.join(folder, "vocab.json"), os.path.join(folder, "merges.txt")
    vocab = _json(vocab_path)
    if not _are_ids(vocab.values()):
        raise _broken(vocab_path, "gives a token no id, or two tokens the same", _OWN_ID)
    lines = [line.split() for line in _read(path).split("\n") if line.strip() and not line.startswith("#version")]
    if wrong := next((line for line in lines if len(line) != 2), None):
        raise _broken(path, f"has the line {' '.join(wrong)!r}", "each line is a pair of tokens")
    try:
        tokenizer = Tokenizer(models.BPE(vocab, [(first, second) for first, second in lines]))
    except Exception as error:  # the library raises nothing more specific
        raise _broken(path, f"does not fit {vocab_path}: {error}", "both come from one training") from error
    prefix_space = bool(_config(folder).get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if _END_OF_TEXT in vocab:
        tokenizer.add_special_tokens([_END_OF_TEXT])
    return str(tokenizer.to_str())


def _are_ids(numbers: Collection[Any]) -> bool:
    """Whether each token has one of its own, and none is so high that tables by id would not fit into memory."""
    is_number = {*map(type, numbers)} <= {int} and 0 <= min(numbers, default=0) <= max(numbers, default=0) <= HIGHEST_ID
    return is_number and len({*numbers}) == len(numbers)


def check_ids(parsed: Any) -> None:
    """Of what is read here before the library has looked at it: KeyError, TypeError or ValueError where it makes no
    sense."""
    check_depth(parsed)
    vocab = parsed["model"]["vocab"]
    if not isinstance(vocab, dict | list):
        raise TypeError("its vocabulary is no mapping")
    if isinstance(vocab, dict) and not _are_ids(vocab.values()):
        raise TypeError(f"its vocabulary has a token whose id is no number of its own: {_OWN_ID}")
    if isinstance(prefix := parsed["model"].get("continuing_subword_prefix"), str) and prefix:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in parsed["model"].get("merges") or []]
        if any(len(pair) != 2 or not str(pair[1]).startswith(prefix) for pair in pairs):  # the library would abort
            raise ValueError(f"its merges have a token that does not begin with its prefix {prefix!r:.60}")
    kinds = {"id": int, "content": str, "special": bool}
    for token in parsed.get("added_tokens") or []:
        if not isinstance(token, dict) or any(type(token.get(name)) is not kind for name, kind in kinds.items()):
            raise TypeError(f"its added token {token!r:.60} lacks an id, its content or whether it is special")
        if not _are_ids([token["id"]]):
            raise TypeError(f"its added token {token!r:.60} has no id: {_OWN_ID}")


def _bert(folder: str) -> str:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    path = os.path.join(folder, "vocab.txt")
    tokens = _read(path).removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    missing = [token for token in _BERT_SPECIAL if token not in vocab]
    if missing:
        raise _broken(path, f"lacks {', '.join(missing)}", "BERT's vocabulary has one token a line, these among them")
    config = _config(folder)
    lower = bool(config.get("do_lower_case", True))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=accents if type(accents := config.get("strip_accents")) is bool else None,
        lowercase=lower,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(list(_BERT_SPECIAL))
    return str(tokenizer.to_str())


def _config(folder: str) -> dict[str, Any]:
    return read_beside(folder, "tokenizer_config.json")


def read_settings(folder: str) -> dict[str, Any]:
    """What a folder says of its tokenizer beside tokenizer.json, as transformers reads it: the older
    special_tokens_map.json counts where the config lists no tokens. DataError for a file that is no JSON object."""
    config, older = _config(folder), read_beside(folder, "special_tokens_map.json")
    return config if "added_tokens_decoder" in config else {**config, **older}


def token_of(setting: Any) -> str | None:
    """The token of a setting such as `eos_token`, which may come with its flags; None where it names none."""
    text = setting.get("content") if isinstance(setting, dict) else setting
    return text if isinstance(text, str) else None


def read_beside(folder: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer's folder; empty if there is no such file."""
    path = os.path.join(folder, name)
    return _json(path) if os.path.exists(path) else {}


def _json(path: str) -> dict[str, Any]:
    try:
        content = orjson.loads(_read(path))
        check_depth(content)
    except ValueError as error:
        raise _broken(path, f"is not JSON: {error}", "it is a JSON object") from error
    if not isinstance(content, dict):
        raise _broken(path, "holds no object", "it is a JSON object")
    return content


def _broken(path: str, what: str, rule: str) -> DataError:
    return DataError(Problem(what, rule, "copy the file again from where the tokenizer came from", path))
