"""Parts of `normalize`: rewrites into the form that later passes read."""
