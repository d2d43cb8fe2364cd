"""A checkpoint's files: the folder with its versions, the manifest, rows of tables, ordinary arrays."""
