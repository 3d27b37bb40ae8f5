"""Floor 4: raw text to shards. Sources, tokenizer training, tokenizing."""
