"""One spelling for the ways in which a tokenizer.json may say the same: that of the tokenizers library when it saves.

The rules are kept here instead of asking the library: a later one may add keys, and the hash of a shard's tokenizer
must not change with it. tests/test_data_tokenizer.py lets the installed library save each spelling again.
"""

from __future__ import annotations

from typing import Any

import orjson

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
_OTHER_KEYS = {"Metaspace": ("add_prefix_space", "str_rep"), "ByteLevel": ("trim_offsets",)}
"""What newer ones no longer have, or what only decides where in a text a token stands."""
_LISTS = ("normalizers", "pretokenizers")


def deciding_ids(parsed: dict[str, Any]) -> dict[str, Any]:
    """Of the content of a tokenizer.json what decides ids, as the library would save it; for orjson to write. Not how a
    text is made from ids, nor what is put around it. Shares what it does not change with `parsed`."""
    added = sorted(parsed.get("added_tokens") or [], key=lambda token: token["id"])
    if parsed.get("normalizer") is None and all(token.get("normalized") for token in added):
        added = [{**token, "normalized": False} for token in added]  # there is nothing to look behind
    return {
        "added_tokens": added,
        "normalizer": _part(parsed.get("normalizer")),
        "pre_tokenizer": _part(parsed.get("pre_tokenizer")),
        "model": _model(parsed["model"]),
    }


def _model(model: dict[str, Any]) -> dict[str, Any]:
    kind = model.get("type") or _kind_of(model)
    model = {"type": kind, **_MODELS.get(kind, {}), **model}
    if kind == "BPE":
        merges = model.get("merges") or []
        if merges and isinstance(merges[0], str):  # as before tokenizers 0.20; never mixed
            model["merges"] = orjson.Fragment(_as_pairs(merges))
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            model[name] = model[name] or None  # 0.0 and "" say the same as nothing
    elif kind == "Unigram":  # of 17 digits the library rounds the last one its own way
        model["vocab"] = [[token, float(f"{score:.12g}")] for token, score in model["vocab"]]
    return model


def _kind_of(model: dict[str, Any]) -> str:
    """Of a model that does not say it, as some old files."""
    if "merges" in model:
        return "BPE"
    if isinstance(model["vocab"], list):
        return "Unigram"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def _as_pairs(merges: list[str]) -> bytes:
    """The JSON of [["a", "b"], ...] for ["a b", ...]. As text, because 50,000 small lists would take 40 ms to make. No
    token of this form has a space in it, and JSON puts none into a string."""
    return b"[[" + orjson.dumps("  ".join(merges)).replace(b"  ", b'"],["').replace(b" ", b'","') + b"]]"


def _part(part: Any) -> Any:
    """A normalizer or pre-tokenizer, and those inside it."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in _PARTS and not (kind == "ByteLevel" and set(part) == {"type"}):  # the normalizer has no options
        part = {**_PARTS[kind], **part}
    others = _OTHER_KEYS.get(str(kind), ())
    return {
        key: [_part(one) for one in value] if key in _LISTS and isinstance(value, list) else value
        for key, value in part.items()
        if key not in others
    }
