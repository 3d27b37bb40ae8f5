"""The tokenizer of an export: its file, the parts its special tokens play, and what its own folder says beside that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bloomery.base.bounded import read_small
from bloomery.base.storage import make_folder, write_atomically
from bloomery.data.tokenizer import Tokenizer, read_settings, token_of

CHAT_TEMPLATE = "chat_template.jinja"
_WITH_IDS = ("bos_token", "eos_token", "pad_token")
"""Parts whose ids stand in a model's config too."""
_PARTS = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[CLS]"),
    "unk_token": ("<unk>", "[UNK]"),
    "pad_token": ("<pad>", "[PAD]"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]",),
}
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SECOND_HAND = ("added_tokens_decoder", "auto_map", "name_or_path", "special_tokens_map_file", "tokenizer_file")
"""What a tokenizer_config.json says of other files: tokenizer.json has the tokens, and no code goes with an export."""


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, model_max_length: int, pairs: bool = False
) -> dict[str, int | None]:
    """What `transformers.AutoTokenizer.from_pretrained(folder)` needs. Returns ids for the model's config.json.

    Settings and chat template of the tokenizer's own folder are kept. `pairs`: there it puts texts together as the
    samples of BERT are; a file that says how is left as it is."""
    own = Path(tokenizer.path).parent
    settings = {key: value for key, value in read_settings(str(own)).items() if key not in _SECOND_HAND}
    parts = _parts(tokenizer, settings)
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if pairs else {}
    config = {
        "clean_up_tokenization_spaces": False,
        **inputs,
        **{key: _kept(tokenizer, key, value) for key, value in settings.items() if not _token(key, value)},
        **parts,
        "model_max_length": model_max_length,
        # Others, such as LlamaTokenizer, build pre-tokenizers of their own instead of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    content = tokenizer.content
    if pairs and tokenizer.parsed.get("post_processor") is None and tokenizer.pairs is not None:
        content = json.dumps({**tokenizer.parsed, "post_processor": tokenizer.pairs}, ensure_ascii=False, indent=2)
    make_folder(folder)
    write_atomically(folder / "tokenizer.json", content)
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    if (own / CHAT_TEMPLATE).is_file():
        write_atomically(folder / CHAT_TEMPLATE, read_small(own / CHAT_TEMPLATE))
    return {f"{part}_id": tokenizer.id_of(parts[part]) for part in _WITH_IDS if part in parts}


def _parts(tokenizer: Tokenizer, settings: dict[str, Any]) -> dict[str, str]:
    """Which token plays which part: as the settings say, else by name; the end of a document is always one."""
    end = tokenizer.eod_token
    told = {key: token for key, value in settings.items() if (token := _token(key, value)) and _has(tokenizer, token)}
    if told:
        return {"eos_token": end, **told}
    special = tokenizer.special_tokens
    found = {part: next((token for token in names if token in special), None) for part, names in _PARTS.items()}
    # As in GPT-2, the end of a document also begins one and stands for what is unknown.
    return {"bos_token": end, "eos_token": end, "unk_token": end, **{k: token for k, token in found.items() if token}}


def _token(key: str, value: Any) -> str | None:
    """The token of a setting such as `bos_token`; None for other settings."""
    return token_of(value) if key.endswith("_token") else None


def _kept(tokenizer: Tokenizer, key: str, value: Any) -> Any:
    """A setting that is no part: of a list of tokens those that the tokenizer has, others as they are."""
    if key not in _LISTS or not isinstance(value, list):
        return value
    tokens = [token_of(each) for each in value]
    return [token for token in tokens if token and _has(tokenizer, token)]


def _has(tokenizer: Tokenizer, token: str) -> bool:
    """transformers would add one that is missing, with an id for which the model has no row."""
    return tokenizer.id_of(token) is not None
