"""Floor 3: from shards on disk to batches of samples. Owns the .bin/.idx format, the sample order and the loader."""
