"""Floor 1: the recipe. `recipe` has the sections, `schema` their fields by path and faults, `load` reads and writes."""
