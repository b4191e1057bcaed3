"""The torch runtime of Modelbay: layers, paged KV cache, continuous batching, and the commands that run models."""
