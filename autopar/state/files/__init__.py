"""A checkpoint's files: locations, the folder with its versions, the manifest, rows of tables, ordinary arrays."""
