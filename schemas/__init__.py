"""What crosses a boundary: requests, failures, tables, settings. Imports neither Ray nor vLLM."""
