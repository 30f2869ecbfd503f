"""The torch engine: transformers model classes on a paged, block-major KV pool."""
