"""Values that tasks log: storage, and reduction over an epoch and over ranks."""
