"""What `split_pipeline` is made of."""
