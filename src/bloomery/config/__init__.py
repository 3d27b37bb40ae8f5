"""Floor 1: the recipe. `recipe` has the sections, `load` reads YAML, `check` has the cross-field rules, `describe` explains."""
