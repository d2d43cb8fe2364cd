"""A checkpoint's files: where they are, the folder with its versions, the manifest, rows of tables, ordinary arrays."""
