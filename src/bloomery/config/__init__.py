"""Floor 1: the recipe. `recipe` has the sections, `load` reads YAML, `faults` finds errors, `describe` prints."""
