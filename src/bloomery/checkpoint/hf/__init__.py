"""Name maps between our parameters and Hugging Face's, one file a family."""
