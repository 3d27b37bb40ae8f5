"""Floor 1: the recipe. `recipe` has the sections, `load` reads YAML, `faults` finds what is wrong, `describe` tells."""

import os

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them takes 15 ms of every command
