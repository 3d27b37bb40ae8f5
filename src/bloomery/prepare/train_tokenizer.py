"""Trains a byte-level BPE tokenizer, GPT-2's kind: every text can be encoded, and the same texts give the same file."""

import os
from collections.abc import Iterable

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from bloomery.base.errors import DataError, Problem
from bloomery.base.storage import make_folder, write_atomically, written_to
from bloomery.data.tokenizer import FILES, Tokenizer

END_OF_TEXT = "<|endoftext|>"


@written_to("--output")
def train_tokenizer(texts: Iterable[str], *, vocab_size: int, output: str) -> Tokenizer:
    """Writes `<output>/tokenizer.json` with exactly `vocab_size` entries and returns it loaded. DataError where another
    tokenizer is there already; the same one is left as it is."""
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
    if reached != vocab_size:
        what = f"the texts give only {reached} entries where vocab_size is {vocab_size}"
        rule = f"the 256 bytes, {END_OF_TEXT}, and pairs that occur in the texts; what is not UTF-8 is left out"
        remedy = f"train on more text, or set vocab_size to {reached} or less"
        raise DataError(Problem(what, rule, remedy, output))
    path = os.path.join(output, "tokenizer.json")
    tokenizer = Tokenizer(trained.to_str(pretty=True), path=path)
    if any(os.path.lexists(os.path.join(output, name)) for name in FILES):
        if (there := Tokenizer.load(output)).content_hash != tokenizer.content_hash:
            hashes = f"hash {there.content_hash[:12]}; the new one has {tokenizer.content_hash[:12]}"
            what = f"holds another tokenizer already ({hashes})"
            rule = "shards that were made with that one would no longer fit"
            raise DataError(Problem(what, rule, "choose another --output, or move that one away", output))
        return there
    make_folder(output)
    write_atomically(path, tokenizer.content)
    return tokenizer
