"""The op table and its torch reference. Other kernel sets register through `register_kernels`."""
