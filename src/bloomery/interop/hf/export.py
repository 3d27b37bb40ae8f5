"""A checkpoint as a Hugging Face folder: safetensors, config, tokenizer, card and proof. Holds one tensor at a time."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bloomery.base.bounded import read_small
from bloomery.base.doing import doing
from bloomery.base.errors import DataError, Problem, mask
from bloomery.base.storage import make_folder, write_atomically, writing, written_to
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.load import Checkpoint, read_checkpoint, tokenizer_of
from bloomery.config.recipe import Recipe
from bloomery.data.tokenizer import Tokenizer
from bloomery.data.tokenizer_files import read_settings, token_of
from bloomery.families.registry import FAMILIES
from bloomery.interop.hf.card import model_card
from bloomery.interop.hf.configs import hf_config
from bloomery.interop.hf.folder import (
    CHAT_TEMPLATE,
    CONFIG,
    PROOF_FILE,
    replace_export,
    require_empty,
    staged,
    write_weights,
)
from bloomery.interop.hf.maps import their_shapes, to_hf
from bloomery.interop.hf.proof import Proof, prove, why_unproven

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
_WITH_IDS = ("bos_token", "eos_token", "pad_token")
"""Special tokens whose ids stand in a model's config too."""
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


@dataclass(frozen=True)
class Exported:
    architecture: str
    tensors: int
    files: int
    step: int
    proof: Proof


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    tokenizer_path: str | None = None,
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
    with_proof: bool = True,
) -> Exported:
    """Write `output` with the recipe's own vocabulary, a new folder, an empty one or an older export. Files get their
    names when all are written and proven, config.json last: without it nothing loads.

    DataError if the proof fails; the folder then holds it, for inspection. After any other error it is as it was.
    """
    rule = f"an export replaces an older export (with {PROOF_FILE}) and nothing else"
    require_empty(output, rule, unless=PROOF_FILE)
    saved = read_checkpoint(find_checkpoint(checkpoint))
    recipe, state = saved.recipe, saved.state
    tokenizer = tokenizer_of(saved, tokenizer_path)
    shapes = their_shapes(recipe.model)
    with written_to("folder"), staged(output, replace_export) as staging:
        with doing(f"writing the weights to {output}") as work, writing(output):
            tensors = work.over(to_hf(lambda ours: saved.read(f"model.{ours}"), recipe.model), len(shapes))
            files = write_weights(staging, shapes, DTYPES[dtype], tensors, shard_bytes=shard_bytes)
        config = _write_configs(staging, recipe, tokenizer, dtype)
        proof = _proof(saved, staging, tokenizer, dtype) if with_proof else Proof(False, "--no-proof")
        write_atomically(staging / PROOF_FILE, json.dumps(asdict(proof), indent=2) + "\n")
        architecture = config["architectures"][0]
        card = model_card(saved, architecture=architecture, dtype=dtype, proof=str(proof))
        write_atomically(staging / "README.md", mask(card))
    if not proof.proven and proof.max_logit_difference is not None:
        rule = f"the limit is {proof.limit:.1e}, and every prompt must be continued identically"
        remedy = f"this is a bug: report it with {output / PROOF_FILE}"
        raise DataError(Problem(f"transformers computes something else: {proof}", rule, remedy, str(output)))
    return Exported(architecture, len(shapes), files, int(state["step"]), proof)


def _proof(saved: Checkpoint, output: Path, tokenizer: Tokenizer, dtype: str) -> Proof:
    if reason := why_unproven(saved.recipe):
        return Proof(False, reason)
    try:
        with doing("verifying the export with transformers"):
            return prove(saved, output, tokenizer, DTYPES[dtype])
    except DataError:
        raise
    except Exception as error:  # whatever transformers may raise
        what = f"transformers cannot load or run the export: {type(error).__name__}: {error}"
        remedy = "report it as a bug; --no-proof exports without asking transformers"
        raise DataError(Problem(what, "an export is verified by running it", remedy)) from error


def _write_configs(output: Path, recipe: Recipe, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    is_encoder = FAMILIES[recipe.model.family].encoder
    ids = write_tokenizer(tokenizer, output, model_max_length=recipe.model.seq_length, pairs=is_encoder)
    if not is_encoder:
        # What ended documents in training ends a text, also where the tokenizer's folder names another end (of a turn).
        ends = list(dict.fromkeys((ids["eos_token_id"], tokenizer.eod_id)))
        generation = {**ids, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        write_atomically(output / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    config = {**hf_config(recipe.model), **ids, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    write_atomically(output / CONFIG, json.dumps(config, indent=2) + "\n")
    return config


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, model_max_length: int, pairs: bool = False
) -> dict[str, int | None]:
    """What `transformers.AutoTokenizer.from_pretrained(folder)` needs. Returns ids for the model's config.json.

    Settings and chat template of the tokenizer's own folder are kept. `pairs`: there it puts texts together as the
    samples of BERT are; a file that says how is left as it is."""
    own = Path(tokenizer.path).parent
    settings = {key: value for key, value in read_settings(str(own)).items() if key not in _SECOND_HAND}
    named = {key: token for key, value in settings.items() if key.endswith("_token") and (token := token_of(value))}
    special = _special_tokens(tokenizer, named)
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if pairs else {}
    config = {
        "clean_up_tokenization_spaces": False,
        **inputs,
        **{key: _known_only(tokenizer, key, value) for key, value in settings.items() if key not in named},
        **special,
        "model_max_length": model_max_length,
        # Others, such as LlamaTokenizer, build pre-tokenizers of their own instead of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    content, ids = tokenizer.content, tokenizer.special_tokens
    if pairs and tokenizer.parsed.get("post_processor") is None and {"[CLS]", "[SEP]"} <= ids.keys():
        # Makes `[CLS] A [SEP] B [SEP]` with token types 0 and 1.
        processor = {"type": "BertProcessing", "sep": ["[SEP]", ids["[SEP]"]], "cls": ["[CLS]", ids["[CLS]"]]}
        content = json.dumps({**tokenizer.parsed, "post_processor": processor}, ensure_ascii=False, indent=2)
    make_folder(folder)
    write_atomically(folder / "tokenizer.json", content)
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    if (own / CHAT_TEMPLATE).is_file():
        write_atomically(folder / CHAT_TEMPLATE, read_small(own / CHAT_TEMPLATE))
    return {f"{part}_id": tokenizer.id_of(special[part]) for part in _WITH_IDS if part in special}


def _special_tokens(tokenizer: Tokenizer, named: dict[str, str]) -> dict[str, str]:
    """As the settings name them, else by spelling; the end of a document is always one. transformers would add one
    that the tokenizer lacks, with an id for which the model has no row."""
    end = tokenizer.eod_token
    known = {key: token for key, token in named.items() if tokenizer.id_of(token) is not None}
    if known:
        return {"eos_token": end, **known}
    found = {part: next((token for token in names if token in tokenizer.special_tokens), None)
             for part, names in _PARTS.items()}  # fmt: skip
    # As in GPT-2, the end of a document also begins one and stands for what is unknown.
    return {"bos_token": end, "eos_token": end, "unk_token": end, **{k: token for k, token in found.items() if token}}


def _known_only(tokenizer: Tokenizer, key: str, value: Any) -> Any:
    """Of a list of special tokens those that the tokenizer has; other settings as they are."""
    if key not in _LISTS or not isinstance(value, list):
        return value
    tokens = [token_of(each) for each in value]
    return [token for token in tokens if token and tokenizer.id_of(token) is not None]
