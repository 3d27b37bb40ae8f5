"""Floor 1: the recipe. `recipe` has the sections, `load` reads YAML, `describe` says it back."""
