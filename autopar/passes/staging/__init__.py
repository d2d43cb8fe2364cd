"""Parts of `split_pipeline`."""
