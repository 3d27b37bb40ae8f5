"""Floor 4: everything that knows more than one rank. Begin with apply.py."""
