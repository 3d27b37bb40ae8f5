"""The chaos matrix: faults x layouts, each with its asserted outcome. matrix.py is the table, `make chaos` runs it."""
