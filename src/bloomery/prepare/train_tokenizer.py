"""Trains a byte-level BPE tokenizer, GPT-2's kind: every text can be encoded. For toys, one of bytes, which needs no
training, or of the characters of the texts. The same texts give the same file."""

import os
from collections.abc import Iterable
from typing import Literal

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import make_folder, write_atomically, written_to
from bloomery.data.tokenizer import Tokenizer
from bloomery.data.tokenizer_files import tokenizer_file

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<|unknown|>"
Kind = Literal["bpe", "bytes", "characters"]


@written_to("--output")
def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int | None = None, output: str, kind: Kind = "bpe", allow_fewer: bool = False
) -> Tokenizer:
    """Writes `<output>/tokenizer.json` and returns it loaded; of kind `bpe` it has exactly `vocab_size` entries,
    or fewer where those are allowed and the texts give no more.
    DataError where another tokenizer is there already; the same one is left as it is."""
    if kind == "characters":
        trained = _of_characters(texts)
    else:
        assert vocab_size or kind == "bytes"
        trained = _bpe(texts if kind == "bpe" else [], vocab_size or 257, output, allow_fewer)
    path = os.path.join(output, "tokenizer.json")
    tokenizer = Tokenizer(trained.to_str(pretty=True), path=path)
    if tokenizer_file(output):
        if (there := Tokenizer.load(output)).content_hash != tokenizer.content_hash:
            hashes = f"hash {there.content_hash[:12]}; the new one has {tokenizer.content_hash[:12]}"
            what = f"holds another tokenizer already ({hashes})"
            rule = "shards that were made with that one would no longer fit"
            raise DataError(Problem(what, rule, "choose another --output, or move that one away", output))
        return there
    make_folder(output)
    write_atomically(path, tokenizer.content)
    return tokenizer


def _of_characters(texts: Iterable[str]) -> HfTokenizer:
    characters = {character for text in texts for character in set(text)}
    words = [END_OF_TEXT, UNKNOWN, *sorted(characters)]
    tokenizer = HfTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT, UNKNOWN])
    return tokenizer


def _bpe(texts: Iterable[str], vocab_size: int, output: str, allow_fewer: bool) -> HfTokenizer:
    trained = HfTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trained.decoder = decoders.ByteLevel()
    trained.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    reached = trained.get_vocab_size()
    if reached > vocab_size or (reached < vocab_size and not allow_fewer):
        what = f"the texts give only {reached} entries where vocab_size is {vocab_size}"
        rule = f"the 256 bytes, {END_OF_TEXT}, and pairs that occur in the texts; what is not UTF-8 is left out"
        remedy = f"train on more text, set vocab_size to {reached} or less, or give --allow-fewer"
        raise DataError(Problem(what, rule, remedy, output))
    return trained
