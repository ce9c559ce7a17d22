"""Package named by `SGLANG_EXTERNAL_MODEL_PACKAGE`: only the architectures that we train. So SGLang
does not import its other 200 architectures at the start."""
