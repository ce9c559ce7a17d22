"""Package for `SGLANG_EXTERNAL_MODEL_PACKAGE`: SGLang imports only the architectures that we train,
not its other 200 architectures."""
