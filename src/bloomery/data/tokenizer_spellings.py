"""One spelling for the ways in which a tokenizer.json may say the same: that of the tokenizers library when it saves.

The rules are kept here instead of asking the library: a later one may add keys, and the hash of a shard's tokenizer
must not change with it. tests/test_data_tokenizer.py lets the installed library save each spelling again.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import orjson

_TOP: dict[str, Any] = {
    "version": "1.0",
    **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder")),
    "added_tokens": [],
}
_MODELS: dict[str, dict[str, Any]] = {
    "BPE": {
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
    },
    "Unigram": {"unk_id": None, "byte_fallback": False},
}
_PARTS: dict[str, dict[str, Any]] = {
    "ByteLevel": {"use_regex": True},
    "Metaspace": {"prepend_scheme": "always", "split": True},
    "Punctuation": {"behavior": "Isolated"},
    "FixedLength": {"length": 5},
    "BertNormalizer": {"strip_accents": None},
}
"""What older files leave out."""
_OLD_KEYS = {"Metaspace": ("add_prefix_space", "str_rep")}
"""What newer ones no longer have; nothing of it decides ids."""
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")


def as_saved(parsed: dict[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json as the library would save it, less what does not decide ids; for orjson to write.
    Shares what it does not change with `parsed`."""
    content = {**_TOP, **parsed}
    for key in ("truncation", "padding"):
        content.pop(key, None)
    content["model"] = _model(content["model"])
    content["added_tokens"] = sorted(content["added_tokens"] or [], key=lambda token: token["id"])
    for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        content[key] = _part(content[key])
    return content


def _model(model: dict[str, Any]) -> dict[str, Any]:
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind not in _MODELS:
        return model
    model = {"type": kind, **_MODELS[kind], **model}
    if kind == "BPE":
        merges = model.get("merges") or []
        if merges and isinstance(merges[0], str):  # as before tokenizers 0.20; never mixed
            model["merges"] = orjson.Fragment(_as_pairs(merges))
        if model["dropout"] is not None:
            model["dropout"] = float(model["dropout"])
    elif {*map(type, map(itemgetter(1), model["vocab"]))} != {float}:
        model["vocab"] = [[token, float(score)] for token, score in model["vocab"]]
    return model


def _as_pairs(merges: list[str]) -> bytes:
    """The JSON of [["a", "b"], ...] for ["a b", ...]. As text, because 50,000 small lists would take 40 ms to make; a
    quote inside a string has a backslash before it, so what is replaced stands only between strings."""
    return b"[" + orjson.dumps(merges).replace(b'","', b'"],["').replace(b" ", b'","') + b"]"


def _part(part: Any) -> Any:
    """A normalizer, pre-tokenizer, post-processor or decoder, and those inside it."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in _PARTS and not (kind == "ByteLevel" and set(part) == {"type"}):  # the normalizer has no options
        part = {**_PARTS[kind], **part}
    old = _OLD_KEYS.get(str(kind), ())
    return {
        key: [_part(one) for one in value] if key in _LISTS and isinstance(value, list) else value
        for key, value in part.items()
        if key not in old
    }
