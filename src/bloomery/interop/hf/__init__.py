"""Hugging Face folders: export with its proof and model card, import with its proof."""
