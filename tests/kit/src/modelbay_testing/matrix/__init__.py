"""Every architecture of the installed Transformers, made tiny, run by the Transformers backend, and compared."""
