"""SGLang as an `Engine`: the only place that imports it."""
