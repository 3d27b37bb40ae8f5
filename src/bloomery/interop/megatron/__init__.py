"""Megatron-LM and Megatron-DeepSpeed command lines, launch scripts and ds_config.json, imported into a recipe."""
