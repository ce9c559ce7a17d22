"""The embedded engine: continuous batching in plain torch, for small models and as a reference."""
