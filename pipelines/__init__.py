"""The path that data takes: read, validate, plan, infer, write; and the engine behind it. See `batch.py`."""
