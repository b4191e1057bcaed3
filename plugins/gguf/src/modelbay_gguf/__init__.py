"""The GGUF load format for Modelbay: config, tokenizer and weights from one file."""
