"""Models that need no file: `zeropipe run`, `profile` and training files take them by name."""

# with random weights: layers, hidden, intermediate, heads, key/value heads, head size, vocabulary.
BUILT_IN = {
    "tiny-qwen3": (8, 256, 768, 4, 2, 64, 2048),
    "tiny-llama": (8, 256, 768, 4, 2, 64, 2048),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-8b": (36, 4096, 12288, 32, 8, 128, 151936),
    "llama-8b": (32, 4096, 14336, 32, 8, 128, 128256),
}
