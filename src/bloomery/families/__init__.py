"""Floor 0: what each model family is, one file a family, as plain data. Imports nothing, so that config can read it."""
