"""SGLang as an `Engine`. Only this package imports sglang."""
