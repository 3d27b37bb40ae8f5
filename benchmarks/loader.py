"""How many tokens per second one core reads for training, against what a device takes.

    python benchmarks/loader.py

Shards are prepared from Python's own library, with tokenizers that are trained on it; then whole micro-batches are read
as training reads them: samples of gpt-1.3b, the same with document masks, and bert-large's masked pairs. CPU seconds
are counted, so other work on the machine hardly matters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from bloomery.cli.main import main as bloomery
from bloomery.data.batch import read_batch
from bloomery.data.open import open_data
from bloomery.sizing.check import load_checked_recipe

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CASES = {
    "gpt-1.3b": ("gpt-1.3b", [], 64_000, 50),
    "gpt-1.3b, documents masked": ("gpt-1.3b", ["data.mask_documents=true"], 64_000, 50),
    "bert-large, masked pairs": ("bert-large", [], 191_000, 5),
}
"""Recipe, overrides, tokens per second that an H200 takes, and how many times that one core must read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bpe = ["--vocab-size", "20000", "--output", str(folder / "gpt-1.3b/tokenizer")]
        run(["tokenizer", "train", "python-stdlib", *bpe])
        train_word_pieces(folder / "bert-large/tokenizer")
        for recipe in ("gpt-1.3b", "bert-large"):
            run(["prepare", recipe, *overrides(folder, recipe)])
        for case, (recipe, more, taken, wanted) in CASES.items():
            found = tokens_per_second(recipe, [*overrides(folder, recipe), *more], args.seconds)
            failed |= found < wanted * taken
            print(f"{case:28} {found:12,.0f} tokens/s a core: {found / taken:5.0f} times an H200 ({wanted} wanted)")
    sys.exit(failed)


def run(command: list[str]) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        assert bloomery(command) == 0


def overrides(folder: Path, recipe: str) -> list[str]:
    """With which it trains on the library."""
    here, sentences = folder / recipe, str(recipe == "bert-large").lower()
    return [
        f"tokenizer={{path: {here}/tokenizer}}",
        f"prepare=[{{output: {here}/library, sources: [python-stdlib], split_sentences: {sentences}}}]",
        f"data={{train: [{{path: {here}/library}}], cache_dir: {here}/cache}}",
        "train.evaluate=null",
        "launch=null",
    ]


def train_word_pieces(folder: Path) -> None:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    files = [str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")]
    made.train(files, trainers.WordPieceTrainer(vocab_size=20_000, special_tokens=SPECIAL))
    first, second = (("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]")))
    made.post_processor = processors.BertProcessing(second, first)
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    names = {f"{each.strip('[]').lower()}_token": each for each in SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def tokens_per_second(name: str, words: list[str], seconds: float) -> float:
    recipe = load_checked_recipe(name, words).recipe
    size, read = recipe.batch.micro_batch_size, 0
    with open_data(recipe) as data:
        read_batch(data.train, 0, size, micro_batch_size=size)
        began = time.process_time()
        while (spent := time.process_time() - began) < seconds:
            read_batch(data.train, read, size, micro_batch_size=size)
            read += size
    return read * recipe.model.seq_length / spent


if __name__ == "__main__":
    main()
