"""Teachers of on-policy distillation; README.md describes them."""
