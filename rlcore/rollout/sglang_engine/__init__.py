"""Adapter that runs SGLang as an `Engine`; only this package imports sglang."""
