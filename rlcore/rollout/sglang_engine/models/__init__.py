"""What `SGLANG_EXTERNAL_MODEL_PACKAGE` names: the architectures that we train, so that SGLang does
not import its other 200 at the start."""
