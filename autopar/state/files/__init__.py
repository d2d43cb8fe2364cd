"""A checkpoint's files: their places, the folder with its versions, the manifest, rows of tables, ordinary arrays."""
