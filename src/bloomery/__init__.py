"""Bloomery: one recipe, from raw text to a verified language model. Start reading at train/loop.py."""

__version__ = "0.1.0"
