"""What runs have written, as pages for people: read, compared and drawn. Imports no torch."""
