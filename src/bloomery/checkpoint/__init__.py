"""Floor 4: the checkpoint folder: save, load, retention, and Hugging Face maps in hf/."""
