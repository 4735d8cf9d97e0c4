"""When `ModelCheckpoint` saves, where to, and what it keeps."""
